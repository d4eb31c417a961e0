package spec

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestRuntimesPlain(t *testing.T) {
	h := realHost(t)
	onBoth(t, h, func(t *testing.T) Input {
		in := realInput(t, "read:/proc/interrupts", "list:/sys/firmware", "write:/proc/sys/kernel/msgmax", "write:/sys/x",
			"read:/etc/hosts", "read:/etc/hostname", "read:/etc/resolv.conf", "write:/tmpfile", "write:/dev/shm/x",
			"stat:/dev/kvm", "stat:/dev/null", "open:/dev/mine", "pid:", "sethostname:x", "unshare:", "list:/sys/fs/cgroup",
			"write:/sys/fs/cgroup/memory/memory.limit_in_bytes")
		c := in.Container.Config
		c.WorkingDir = "/made/for/me"
		c.Devices = []*runtimeapi.Device{{HostPath: "/dev/zero", ContainerPath: "/dev/mine", Permissions: "r"}}
		c.Linux.Resources = &runtimeapi.LinuxContainerResources{
			CpuShares: 100, CpuQuota: 50000, CpuPeriod: 100000, MemoryLimitInBytes: 64 << 20, CpusetCpus: "0",
			HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: h.HugepageSizes[0]}},
		}
		c.Linux.SecurityContext.RunAsUsername = "root"
		return in
	}, func(t *testing.T, r report) {
		assert.Equal(t, "/made/for/me", r.Cwd)
		assert.Contains(t, r.Env, "HOSTNAME=web-0")
		assert.Contains(t, r.Env, "LANG=C")
		assert.Equal(t, "1", r.Did["pid:"])
		assert.Equal(t, "pod's\n", r.Did["read:/etc/hosts"])
		assert.Equal(t, "web-0\n", r.Did["read:/etc/hostname"])
		assert.Empty(t, r.Did["read:/proc/interrupts"], "masked")
		assert.Equal(t, "0", r.Did["list:/sys/firmware"], "masked")
		assert.Equal(t, "00000000a80425fb", r.Status["CapEff"], "the default capabilities")
		assert.Equal(t, "0000000000000000", r.Status["CapInh"])
		assert.Equal(t, "0", r.Status["Seccomp"], "a request without a profile is unconfined")
		assert.Equal(t, "0", r.Status["NoNewPrivs"])
		succeeded(t, r, "write:/tmpfile", "write:/dev/shm/x", "stat:/dev/null", "open:/dev/mine", "read:/etc/resolv.conf", "list:/sys/fs/cgroup")
		failed(t, r, "write:/proc/sys/kernel/msgmax", "write:/sys/x", "stat:/dev/kvm", "sethostname:x", "unshare:",
			"write:/sys/fs/cgroup/memory/memory.limit_in_bytes")
	})
}

func TestRuntimesConfined(t *testing.T) {
	onBoth(t, realHost(t), func(t *testing.T) Input {
		in := realInput(t, "unshare:", "sethostname:x", "write:/x", "read:/etc/passwd", "list:/made/secret", "write:/made/ro/x")
		require.NoError(t, os.MkdirAll(filepath.Join(in.Rootfs, "made/secret/inner"), 0o777))
		require.NoError(t, os.MkdirAll(filepath.Join(in.Rootfs, "made/ro"), 0o777))
		require.NoError(t, os.Chmod(filepath.Join(in.Rootfs, "made/ro"), 0o777))
		sc := in.Container.Config.Linux.SecurityContext
		sc.RunAsUser, sc.RunAsGroup, sc.SupplementalGroups = int64Value(1000), int64Value(2000), []int64{3000}
		sc.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
		sc.NoNewPrivs, sc.ReadonlyRootfs = true, true
		sc.MaskedPaths, sc.ReadonlyPaths = []string{"/made/secret"}, []string{"/made/ro"}
		sc.Capabilities = &runtimeapi.Capability{DropCapabilities: []string{"ALL"}, AddAmbientCapabilities: []string{"NET_BIND_SERVICE"}}
		return in
	}, func(t *testing.T, r report) {
		assert.Equal(t, "1000 1000 1000 1000", r.Status["Uid"])
		assert.Equal(t, "2000 2000 2000 2000", r.Status["Gid"])
		assert.Equal(t, "2000 3000 50000 50001", r.Status["Groups"])
		assert.Equal(t, "2", r.Status["Seccomp"], "filtered")
		assert.Equal(t, "1", r.Status["NoNewPrivs"])
		for _, set := range []string{"CapEff", "CapPrm", "CapBnd", "CapAmb", "CapInh"} {
			assert.Equal(t, "0000000000000400", r.Status[set], "%s: NET_BIND_SERVICE alone", set)
		}
		assert.Equal(t, "0", r.Did["list:/made/secret"])
		succeeded(t, r, "read:/etc/passwd")
		failed(t, r, "unshare:", "sethostname:x", "write:/x", "write:/made/ro/x")
	})
}

// TestRuntimesSeccomp runs the same calls with and without the filter.
func TestRuntimesSeccomp(t *testing.T) {
	h := realHost(t)
	profileFile := filepath.Join(t.TempDir(), "profile.json")
	writeFile(t, profileFile, `{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["sethostname"], "action": "SCMP_ACT_ERRNO"}]}`)
	for name, c := range map[string]struct {
		profile *runtimeapi.SecurityProfile
		allowed bool
	}{
		"unconfined": {&runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined}, true},
		"localhost":  {localhostProfile(profileFile), false},
	} {
		t.Run(name, func(t *testing.T) {
			onBoth(t, h, func(t *testing.T) Input {
				in := realInput(t, "sethostname:changed", "hostname:")
				sc := in.Container.Config.Linux.SecurityContext
				sc.Seccomp = c.profile
				sc.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"SYS_ADMIN"}}
				return in
			}, func(t *testing.T, r report) {
				if c.allowed {
					succeeded(t, r, "sethostname:changed")
					assert.Equal(t, "changed", r.Did["hostname:"])
				} else {
					failed(t, r, "sethostname:changed")
				}
			})
		})
	}
}

func TestRuntimesPrivileged(t *testing.T) {
	h := realHost(t)
	onBoth(t, h, func(t *testing.T) Input {
		in := realInput(t, "mount:/mnt", "unshare:", "stat:/dev/loop0", "open:/dev/loop0", "read:/proc/interrupts", "sethostname:x",
			"stat:/dev/pts/ptmx")
		require.NoError(t, os.MkdirAll(filepath.Join(in.Rootfs, "mnt"), 0o755))
		in.Pod.Config.Linux.SecurityContext.Privileged = true
		in.Container.Config.Linux.SecurityContext.Privileged = true
		in.Container.Config.Linux.SecurityContext.Seccomp = &runtimeapi.SecurityProfile{}
		return in
	}, func(t *testing.T, r report) {
		own, err := os.ReadFile("/proc/self/status")
		require.NoError(t, err)
		assert.Contains(t, string(own), "CapBnd:\t"+r.Status["CapEff"], "all that the host has")
		assert.Equal(t, "0", r.Status["Seccomp"])
		assert.NotEmpty(t, r.Did["read:/proc/interrupts"], "not masked")
		assert.Contains(t, r.Mounts["/sys"], "rw")
		succeeded(t, r, "mount:/mnt", "unshare:", "stat:/dev/loop0", "open:/dev/loop0", "read:/proc/interrupts", "sethostname:x",
			"stat:/dev/pts/ptmx")
	})
}

// TestRuntimesHostDev binds the host's whole /dev, in which the runtimes must not create or change anything.
func TestRuntimesHostDev(t *testing.T) {
	before, err := os.Stat("/dev/null")
	require.NoError(t, err)
	onBoth(t, realHost(t), func(t *testing.T) Input {
		in := realInput(t, "stat:/dev/loop0", "stat:/dev/null", "list:/dev/shm")
		in.Pod.Config.Linux.SecurityContext.Privileged = true
		in.Container.Config.Linux.SecurityContext.Privileged = true
		in.Container.Config.Mounts = append(in.Container.Config.Mounts, &runtimeapi.Mount{HostPath: "/dev", ContainerPath: "/dev"})
		return in
	}, func(t *testing.T, r report) {
		succeeded(t, r, "stat:/dev/loop0", "stat:/dev/null", "list:/dev/shm")
		after, err := os.Stat("/dev/null")
		require.NoError(t, err)
		assert.True(t, os.SameFile(before, after))
	})
}

func TestRuntimesMounts(t *testing.T) {
	h := realHost(t)
	onBoth(t, h, func(t *testing.T) Input {
		in := realInput(t, "write:/ro/x", "write:/ro/inner/x", "write:/rro/x", "write:/rro/inner/x", "write:/rw/x", "read:/etc/hosts",
			"list:/nested", "write:/nested/deep/x")
		dir := t.TempDir()
		inner := filepath.Join(dir, "inner")
		require.NoError(t, os.MkdirAll(inner, 0o755))
		require.NoError(t, os.MkdirAll(filepath.Join(dir, "deep"), 0o755))
		require.NoError(t, unix.Mount("x", inner, "tmpfs", 0, ""))
		t.Cleanup(func() { assert.NoError(t, unix.Unmount(inner, unix.MNT_DETACH)) })
		hosts := filepath.Join(t.TempDir(), "hosts")
		writeFile(t, hosts, "kubelet's\n")
		in.Container.Config.Mounts = append(in.Container.Config.Mounts,
			&runtimeapi.Mount{HostPath: t.TempDir(), ContainerPath: "/nested/deep"},
			&runtimeapi.Mount{HostPath: dir, ContainerPath: "/nested", Readonly: true},
			&runtimeapi.Mount{HostPath: dir, ContainerPath: "/ro", Readonly: true},
			&runtimeapi.Mount{HostPath: dir, ContainerPath: "/rro", Readonly: true, RecursiveReadOnly: true},
			&runtimeapi.Mount{HostPath: t.TempDir(), ContainerPath: "/rw", MountOptions: []string{"noexec", "nodev", "nosuid"}},
			&runtimeapi.Mount{HostPath: hosts, ContainerPath: "/etc/hosts"},
		)
		return in
	}, func(t *testing.T, r report) {
		succeeded(t, r, "write:/ro/inner/x", "write:/rw/x", "write:/nested/deep/x")
		failed(t, r, "write:/ro/x", "write:/rro/x", "write:/rro/inner/x")
		assert.Equal(t, "kubelet's\n", r.Did["read:/etc/hosts"])
		for _, option := range []string{"noexec", "nodev", "nosuid", "rw"} {
			assert.Contains(t, r.Mounts["/rw"], option)
		}
	})
}

func TestRuntimesPropagation(t *testing.T) {
	base := t.TempDir()
	require.NoError(t, unix.Mount("x", base, "tmpfs", 0, ""))
	t.Cleanup(func() { assert.NoError(t, unix.Unmount(base, unix.MNT_DETACH)) })
	require.NoError(t, unix.Mount("", base, "", unix.MS_SHARED, ""))
	h := realHost(t)
	for name, mode := range map[string]runtimeapi.MountPropagation{"private": private, "slave": slave, "shared": bidirect} {
		t.Run(name, func(t *testing.T) {
			var from string
			onBoth(t, h, func(t *testing.T) Input {
				in := realInput(t, "mount:/vol/from-inside")
				from = filepath.Join(base, name, in.Container.ID)
				require.NoError(t, os.MkdirAll(filepath.Join(from, "from-inside"), 0o755))
				t.Cleanup(func() { _ = unix.Unmount(filepath.Join(from, "from-inside"), unix.MNT_DETACH) })
				in.Pod.Config.Linux.SecurityContext.Privileged = true
				in.Container.Config.Linux.SecurityContext.Privileged = true
				in.Container.Config.Mounts = append(in.Container.Config.Mounts,
					&runtimeapi.Mount{HostPath: from, ContainerPath: "/vol", Propagation: mode})
				return in
			}, func(t *testing.T, r report) {
				succeeded(t, r, "mount:/vol/from-inside")
				optional := r.Mounts["/vol"]
				assert.Equal(t, mode == bidirect, strings.Contains(optional, "shared:"), optional)
				assert.Equal(t, mode == slave, strings.Contains(optional, "master:"), optional)
				table, err := os.ReadFile("/proc/self/mountinfo")
				require.NoError(t, err)
				assert.Equal(t, mode == bidirect, strings.Contains(string(table), from+"/from-inside"), "seen on the host")
			})
		})
	}
}

// TestRuntimesHostNamespaces checks that NODE is the node's namespace.
func TestRuntimesHostNamespaces(t *testing.T) {
	links := []string{"link:/proc/self/ns/net", "link:/proc/self/ns/ipc", "link:/proc/self/ns/uts", "link:/proc/self/ns/pid"}
	onBoth(t, realHost(t), func(t *testing.T) Input {
		in := realInput(t, links...)
		node := &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE, Pid: runtimeapi.NamespaceMode_NODE,
			Ipc: runtimeapi.NamespaceMode_NODE}
		in.Pod.Config.Linux.SecurityContext.NamespaceOptions = node
		in.Container.Config.Linux.SecurityContext.NamespaceOptions = node
		return in
	}, func(t *testing.T, r report) {
		for _, deed := range links {
			want, err := os.Readlink(strings.TrimPrefix(deed, "link:"))
			require.NoError(t, err)
			assert.Equal(t, want, r.Did[deed])
		}
	})
}

// TestRuntimesPause runs the pause container with the probe as the pause binary.
func TestRuntimesPause(t *testing.T) {
	for name, runtime := range runtimes {
		t.Run(name, func(t *testing.T) {
			pid, id := testNamespaces(t), fmt.Sprintf("tripod-spec-test-%d-pause-%s", os.Getpid(), name)
			s := Pause(PauseInput{
				Pod: testPod(), Host: realHost(t), Rootfs: t.TempDir(), Binary: probeBinary(t), Args: []string{"write:/x", "pid:", "unshare:"},
				Net: fmt.Sprintf("/proc/%d/ns/net", pid), IPC: fmt.Sprintf("/proc/%d/ns/ipc", pid), UTS: fmt.Sprintf("/proc/%d/ns/uts", pid),
				CgroupsPath: "/" + id,
			})
			out, err := run(t, runtime, id, s)
			require.NoError(t, err)
			var r report
			require.NoError(t, json.Unmarshal(out, &r))
			assert.Equal(t, "1", r.Did["pid:"])
			assert.Equal(t, "0000000000000000", r.Status["CapBnd"])
			assert.Equal(t, "65535 65535 65535 65535", r.Status["Uid"])
			assert.Equal(t, "2", r.Status["Seccomp"])
			failed(t, r, "write:/x", "unshare:")
		})
	}
}

// TestRuntimesExecAndUpdate runs another process in a running container and changes its limits.
func TestRuntimesExecAndUpdate(t *testing.T) {
	h := realHost(t)
	for name, runtime := range runtimes {
		t.Run(name, func(t *testing.T) {
			in := realInput(t)
			c := in.Container.Config
			c.Command, c.WorkingDir = []string{probeProgram, "hold"}, "/etc"
			c.Linux.Resources.MemoryLimitInBytes = 64 << 20
			sc := c.Linux.SecurityContext
			sc.RunAsUser, sc.NoNewPrivs = int64Value(1000), true
			sc.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
			s, _ := build(t, in, h)
			state := startHeld(t, runtime, in.Container.ID, s)

			p, err := Process(ExecInput{Spec: s, Cmd: []string{probeProgram, "unshare:", "pid:"}})
			require.NoError(t, err)
			file := filepath.Join(t.TempDir(), "process.json")
			writeFile(t, file, toJSON(t, p))
			out, err := ociCommand(runtime, state, "exec", "--process", file, in.Container.ID).CombinedOutput()
			require.NoError(t, err, "%s", out)
			var r report
			require.NoError(t, json.Unmarshal(out, &r))
			assert.Equal(t, "1000 1000 1000 1000", r.Status["Uid"])
			assert.Equal(t, "1001 50000 50001", r.Status["Groups"])
			assert.Equal(t, "/etc", r.Cwd)
			assert.Equal(t, "2", r.Status["Seccomp"])
			assert.Equal(t, "1", r.Status["NoNewPrivs"])
			assert.Equal(t, "0000000000000000", r.Status["CapEff"], "an unprivileged user has none to begin with")
			assert.NotEqual(t, "1", r.Did["pid:"])
			failed(t, r, "unshare:")

			changed := proto.CloneOf(c.Linux.Resources)
			changed.MemoryLimitInBytes = 96 << 20
			limits, err := Resources(changed, h)
			require.NoError(t, err)
			writeFile(t, file, toJSON(t, limits))
			out, err = ociCommand(runtime, state, "update", "--resources", file, in.Container.ID).CombinedOutput()
			require.NoError(t, err, "%s", out)
			now, err := os.ReadFile(memoryLimitFile(h, in.CgroupsPath))
			require.NoError(t, err)
			assert.Equal(t, fmt.Sprint(96<<20), strings.TrimSpace(string(now)))
		})
	}
}
