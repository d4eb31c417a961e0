package spec

import (
	"flag"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

var update = flag.Bool("update", false, "write the golden files in testdata")

// golden compares text with testdata/NAME.json.
func golden(t *testing.T, name, text string) {
	t.Helper()
	file := filepath.Join("testdata", name+".json")
	if *update {
		writeFile(t, file, text)
	}
	want, err := os.ReadFile(file)
	require.NoError(t, err, "run go test -update once")
	assert.Equal(t, string(want), text, "differs from %s; if the change is intended, run go test -update", file)
}

// TestBuildGolden compares whole specifications; the other tests cover single fields.
func TestBuildGolden(t *testing.T) {
	data := t.TempDir()
	writeFile(t, filepath.Join(data, "hosts"), "")
	for name, change := range map[string]func(*Input, *Host){
		"plain": func(*Input, *Host) {},
		"everything": func(in *Input, _ *Host) {
			c := in.Container.Config
			c.Command, c.Args = []string{"/bin/server"}, []string{"--port", "80"}
			c.WorkingDir, c.Tty = "/srv/../srv/www/", true
			c.Envs = []*runtimeapi.KeyValue{{Key: "LANG", Value: []byte("de_DE.UTF-8")}, {Key: "MODE", Value: []byte("a=b")}}
			c.Mounts = []*runtimeapi.Mount{
				{ContainerPath: "/data/", HostPath: data, Readonly: true},
				{ContainerPath: "/etc/hosts", HostPath: filepath.Join(data, "hosts")},
				{ContainerPath: "/data/cache", HostPath: data, MountOptions: []string{"nosuid", "noexec"}},
				{ContainerPath: "/img", Image: &runtimeapi.ImageSpec{Image: "sha256:beef"}, Readonly: true},
			}
			in.ImageVolumes = map[string]string{"/img": "/run/images/beef"}
			c.Devices = []*runtimeapi.Device{{HostPath: "/dev/zero", ContainerPath: "/dev/hole", Permissions: "rw"}}
			c.Linux.Resources = &runtimeapi.LinuxContainerResources{
				CpuShares: 512, CpuQuota: 50000, CpuPeriod: 100000, CpusetCpus: "0-1", CpusetMems: "0",
				MemoryLimitInBytes: 64 << 20, OomScoreAdj: 900,
				HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB", Limit: 4 << 20}, {PageSize: "1GB"}},
			}
			sc := c.Linux.SecurityContext
			sc.RunAsUser, sc.RunAsGroup, sc.SupplementalGroups = int64Value(1000), int64Value(2000), []int64{3000, 2500}
			sc.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"NET_ADMIN"}, DropCapabilities: []string{"CAP_CHOWN"},
				AddAmbientCapabilities: []string{"net_bind_service"}}
			sc.ReadonlyRootfs, sc.NoNewPrivs = true, true
			sc.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
			c.StopSignal = runtimeapi.Signal_SIGNAL_SIGQUIT
		},
		"cgroup-v2": func(in *Input, h *Host) {
			h.CgroupV2 = true
			in.Container.Config.Linux.Resources = &runtimeapi.LinuxContainerResources{
				MemoryLimitInBytes: 64 << 20, CpuShares: 2, Unified: map[string]string{"memory.high": "60000000"},
			}
		},
		"host-namespaces": func(in *Input, _ *Host) {
			node := &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE, Pid: runtimeapi.NamespaceMode_NODE,
				Ipc: runtimeapi.NamespaceMode_NODE}
			in.Pod.Config.Linux.SecurityContext.NamespaceOptions = node
			in.Pod.Config.Hostname = ""
		},
		"own-namespaces": func(in *Input, _ *Host) {
			in.Container.Config.Linux.SecurityContext.NamespaceOptions = &runtimeapi.NamespaceOption{
				Pid: runtimeapi.NamespaceMode_CONTAINER, Ipc: runtimeapi.NamespaceMode_CONTAINER,
			}
			in.UTS, in.ShmPath = "", ""
		},
	} {
		t.Run(name, func(t *testing.T) {
			in, h := testInput(t), fullHost()
			change(&in, &h)
			s, resolved := build(t, in, h)
			if s.Linux.Seccomp != nil { // containerd tests its own profile; TestRuntimes tests that it applies
				s.Linux.Seccomp = &specs.LinuxSeccomp{DefaultAction: s.Linux.Seccomp.DefaultAction}
			}
			text := toJSON(t, map[string]any{"spec": s, "resolved": resolved})
			golden(t, name, strings.NewReplacer(in.Rootfs, "ROOTFS", data, "DATA").Replace(text))
		})
	}
}

func TestPauseGolden(t *testing.T) {
	s := Pause(PauseInput{
		Pod: testPod(), Host: fullHost(), Rootfs: "/run/pod/pause", Binary: "/usr/bin/catatonit", Args: []string{"-P"},
		Net: "/run/ns/net", IPC: "/run/ns/ipc", UTS: "/run/ns/uts", CgroupsPath: "/kubepods/pause",
	})
	s.Linux.Seccomp = &specs.LinuxSeccomp{DefaultAction: s.Linux.Seccomp.DefaultAction}
	golden(t, "pause", toJSON(t, s))
}

// TestBuildPrivileged has no golden file because the devices are this machine's.
func TestBuildPrivileged(t *testing.T) {
	in, h := testInput(t), fullHost()
	in.Pod.Config.Linux.SecurityContext.Privileged = true
	sc := in.Container.Config.Linux.SecurityContext
	sc.Privileged = true
	sc.MaskedPaths = []string{"/proc/kcore"}
	sc.Seccomp = localhostProfile("relative/and/void")
	sc.Capabilities = &runtimeapi.Capability{DropCapabilities: []string{"ALL"}}
	h.Caps = []string{"CAP_CHOWN", "CAP_SYS_ADMIN"}
	s, _ := build(t, in, h)
	assert.Equal(t, h.Caps, s.Process.Capabilities.Bounding)
	assert.Nil(t, s.Linux.Seccomp)
	assert.Empty(t, s.Linux.MaskedPaths)
	assert.Empty(t, s.Linux.ReadonlyPaths)
	assert.Equal(t, []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}, s.Linux.Resources.Devices)
	paths := map[string]bool{}
	for _, d := range s.Linux.Devices {
		paths[d.Path] = true
		for _, own := range []string{"/dev/pts/", "/dev/shm/", "/dev/console"} {
			assert.False(t, strings.HasPrefix(d.Path, own), d.Path)
		}
	}
	assert.True(t, paths["/dev/null"] && paths["/dev/tty"], "%v", paths)
	for _, m := range s.Mounts {
		if m.Destination == "/sys" || m.Destination == "/sys/fs/cgroup" {
			assert.Contains(t, m.Options, "rw", m.Destination)
		}
	}

	in.Container.Config.Mounts = []*runtimeapi.Mount{{ContainerPath: "/dev", HostPath: "/dev"}}
	s, _ = build(t, in, h)
	assert.Empty(t, s.Linux.Devices, "a bind-mounted /dev has its nodes")
	for _, m := range s.Mounts {
		assert.False(t, strings.HasPrefix(m.Destination, "/dev/"), "%s would hide the host's", m.Destination)
	}
}

// TestImageLabelsNeverReachTheSpec tests fault I1.
func TestImageLabelsNeverReachTheSpec(t *testing.T) {
	in := testInput(t)
	in.Image.Labels = map[string]string{AnnotationPod: "another", "run.oci.handler": "krun", "org.systemd.property.X": "1"}
	in.Container.Config.Annotations = map[string]string{AnnotationContainer: "another", "run.oci.keep_original_groups": "1"}
	in.Container.Config.Labels = map[string]string{"run.oci.handler": "krun"}
	s, _ := build(t, in, fullHost())
	assert.Equal(t, in.Pod.ID, s.Annotations[AnnotationPod])
	assert.Equal(t, in.Container.ID, s.Annotations[AnnotationContainer])
	for key := range maps.Keys(s.Annotations) {
		assert.True(t, strings.HasPrefix(key, "io.tripod.") || strings.HasPrefix(key, "io.kubernetes.cri."), key)
	}
}

// TestRootfsWithSymlinks tests fault I3: the runtime's mount points must be real directories.
func TestRootfsWithSymlinks(t *testing.T) {
	for _, dir := range []string{"proc", "sys", "dev"} {
		in := testInput(t)
		require.NoError(t, os.Symlink("/tmp", filepath.Join(in.Rootfs, dir)))
		_, _, err := Build(in, fullHost())
		requireRefused(t, err, errInvalid, "/"+dir)
	}
}

func TestImageVolumesAreMadeInsideTheRoot(t *testing.T) {
	in := testInput(t)
	outside := t.TempDir()
	require.NoError(t, os.Symlink(outside, filepath.Join(in.Rootfs, "escape")))
	in.Image.Volumes = map[string]struct{}{"/var/lib/db": {}}
	build(t, in, fullHost())
	assert.DirExists(t, filepath.Join(in.Rootfs, "var/lib/db"))

	in.Image.Volumes = map[string]struct{}{"/escape/dir": {}}
	_, _, err := Build(in, fullHost())
	requireRefused(t, err, errInvalid, "/escape/dir")
	entries, err := os.ReadDir(outside)
	require.NoError(t, err)
	assert.Empty(t, entries)

	in.Image.Volumes = map[string]struct{}{"/proc/self": {}}
	_, _, err = Build(in, fullHost())
	requireRefused(t, err, errInvalid, "image Volumes")
}

func TestMissingPathsAreOurFault(t *testing.T) {
	for name, forget := range map[string]func(*Input){
		"network": func(in *Input) { in.Net = "" },
		"ipc":     func(in *Input) { in.IPC = "" },
		"pid":     func(in *Input) { in.PID = "" },
		"/dev/shm": func(in *Input) {
			in.ShmPath = ""
		},
		"sha256:beef": func(in *Input) {
			in.Container.Config.Mounts = []*runtimeapi.Mount{{ContainerPath: "/i", Readonly: true,
				Image: &runtimeapi.ImageSpec{Image: "sha256:beef"}}}
		},
	} {
		in := testInput(t)
		forget(&in)
		_, _, err := Build(in, fullHost())
		require.ErrorContains(t, err, name)
		assert.NotErrorIs(t, err, errInvalid)
	}
}

func TestProcessOfExec(t *testing.T) {
	in := testInput(t)
	sc := in.Container.Config.Linux.SecurityContext
	sc.RunAsUser, sc.NoNewPrivs = int64Value(1000), true
	s, _ := build(t, in, fullHost())
	before := toJSON(t, s)
	p, err := Process(ExecInput{Spec: s, Cmd: []string{"/bin/sh", "-c", "id"}, TTY: true})
	require.NoError(t, err)
	assert.Equal(t, []string{"/bin/sh", "-c", "id"}, p.Args)
	assert.True(t, p.Terminal)
	assert.Contains(t, p.Env, "TERM=xterm")
	assert.Equal(t, s.Process.User, p.User)
	assert.Equal(t, s.Process.Capabilities, p.Capabilities)
	assert.True(t, p.NoNewPrivileges)
	assert.Equal(t, before, toJSON(t, s), "the container's own specification is untouched")

	_, err = Process(ExecInput{Spec: s})
	requireRefused(t, err, errInvalid, "cmd")
	_, err = Process(ExecInput{Spec: s, Cmd: []string{"a\x00b"}})
	requireRefused(t, err, errInvalid, "cmd")
}

func TestArguments(t *testing.T) {
	image := ocispec.ImageConfig{Entrypoint: []string{"E"}, Cmd: []string{"C"}}
	for name, c := range map[string]struct {
		command, args []string
		image         ocispec.ImageConfig
		want          []string
	}{
		"image alone":                  {image: image, want: []string{"E", "C"}},
		"args replace cmd":             {args: []string{"a"}, image: image, want: []string{"E", "a"}},
		"command replaces both":        {command: []string{"c"}, image: image, want: []string{"c"}},
		"command and args":             {command: []string{"c"}, args: []string{"a"}, image: image, want: []string{"c", "a"}},
		"image with cmd alone":         {image: ocispec.ImageConfig{Cmd: []string{"C"}}, want: []string{"C"}},
		"args over cmd, no entrypoint": {args: []string{"a"}, image: ocispec.ImageConfig{Cmd: []string{"C"}}, want: []string{"a"}},
	} {
		got, err := arguments(&runtimeapi.ContainerConfig{Command: c.command, Args: c.args}, c.image)
		require.NoError(t, err, name)
		assert.Equal(t, c.want, got, name)
	}
	_, err := arguments(&runtimeapi.ContainerConfig{}, ocispec.ImageConfig{})
	requireRefused(t, err, errInvalid, "command")
	_, err = arguments(&runtimeapi.ContainerConfig{}, ocispec.ImageConfig{Cmd: []string{"\xff"}})
	requireRefused(t, err, errInvalid, "command")
}

func TestVariables(t *testing.T) {
	c := &runtimeapi.ContainerConfig{Tty: true, Envs: []*runtimeapi.KeyValue{
		{Key: "A", Value: []byte("1")}, {Key: "A", Value: []byte("2")}, {Key: "HOSTNAME", Value: []byte("mine")},
	}}
	got, err := variables(testPod(), c, ocispec.ImageConfig{Env: []string{"A=0", "B=x=y", "NOVALUE"}}, fullHost())
	require.NoError(t, err)
	assert.Equal(t, []string{"A=2", "B=x=y", "HOSTNAME=mine", "PATH=" + defaultPath, "TERM=xterm"}, got)

	pod := testPod()
	pod.Config.Hostname = ""
	got, err = variables(pod, &runtimeapi.ContainerConfig{}, ocispec.ImageConfig{Env: []string{"PATH=/p"}}, fullHost())
	require.NoError(t, err)
	assert.Equal(t, []string{"PATH=/p", "HOSTNAME=node"}, got)

	_, err = variables(testPod(), &runtimeapi.ContainerConfig{}, ocispec.ImageConfig{Env: []string{"A=\xff"}}, fullHost())
	requireRefused(t, err, errInvalid, `"A"`)
}

// TestWorkingDir tests fault C6: no path leads to a working directory below /proc.
func TestWorkingDir(t *testing.T) {
	root := testRootfs(t)
	require.NoError(t, os.Symlink("/proc/self", filepath.Join(root, "innocent")))
	require.NoError(t, os.Symlink("../../../proc", filepath.Join(root, "etc/up")))
	require.NoError(t, os.Symlink("/srv", filepath.Join(root, "www")))
	for dir, want := range map[string]string{"": "/", "/a/../b/": "/b", "/www": "/www", "/procession": "/procession"} {
		got, err := workingDir(&runtimeapi.ContainerConfig{WorkingDir: dir}, ocispec.ImageConfig{}, root)
		require.NoError(t, err, dir)
		assert.Equal(t, want, got)
	}
	for _, dir := range []string{"relative", "/proc/self/fd/7", "/x/../proc", "/innocent/fd/8", "/etc/up/self/fd/9", "/a\x00b"} {
		for _, c := range []struct {
			cri   string
			image ocispec.ImageConfig
		}{{cri: dir}, {image: ocispec.ImageConfig{WorkingDir: dir}}} {
			_, err := workingDir(&runtimeapi.ContainerConfig{WorkingDir: c.cri}, c.image, root)
			require.ErrorIs(t, err, errInvalid, dir)
		}
	}
}

func TestStopSignal(t *testing.T) {
	for image, want := range map[string]runtimeapi.Signal{
		"": runtimeapi.Signal_SIGNAL_SIGTERM, "SIGQUIT": runtimeapi.Signal_SIGNAL_SIGQUIT, "quit": runtimeapi.Signal_SIGNAL_SIGQUIT,
		"15": runtimeapi.Signal_SIGNAL_SIGTERM, "17": runtimeapi.Signal_SIGNAL_SIGCHLD, "SIGRTMIN+3": runtimeapi.Signal_SIGNAL_SIGRTMINPLUS3,
		"37": runtimeapi.Signal_SIGNAL_SIGRTMINPLUS3, "RTMAX-1": runtimeapi.Signal_SIGNAL_SIGRTMAXMINUS1,
	} {
		got, err := stopSignal(0, image)
		require.NoError(t, err, image)
		assert.Equal(t, want, got, image)
	}
	for _, image := range []string{"SIGNOPE", "0", "65", "-9", "RUNTIME_DEFAULT", "\xff"} {
		_, err := stopSignal(0, image)
		require.ErrorIs(t, err, errInvalid, image)
	}
	got, err := stopSignal(runtimeapi.Signal_SIGNAL_SIGINT, "SIGQUIT")
	require.NoError(t, err)
	assert.Equal(t, runtimeapi.Signal_SIGNAL_SIGINT, got, "the request's wins")
	_, err = stopSignal(1000, "")
	requireRefused(t, err, errInvalid, "stop_signal")
}

// TestSignalNumbers checks every signal of the CRI: the numbers are unique except for known aliases.
func TestSignalNumbers(t *testing.T) {
	byNumber := map[int]string{}
	for n, name := range runtimeapi.Signal_name {
		s := runtimeapi.Signal(n)
		if s == runtimeapi.Signal_SIGNAL_RUNTIME_DEFAULT || isAlias(s) {
			continue
		}
		number := int(SignalNumber(s))
		assert.Empty(t, byNumber[number], "%s and %s", name, byNumber[number])
		byNumber[number] = name
	}
	assert.Equal(t, "SIGNAL_SIGKILL", byNumber[9])
	assert.Equal(t, "SIGNAL_SIGRTMAX", byNumber[64])
	assert.Len(t, byNumber, 62, "all signals except the two that the C library reserves") // 32 and 33
}
