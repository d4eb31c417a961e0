package image

import (
	"archive/tar"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness/testns"
	"github.com/tripod-run/tripod/test/until"
)

// pauseImage pushes an image for the sandboxes of pods.
func pauseImage(t testing.TB, reg *testRegistry) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "pause")
	build := exec.Command("go", "build", "-o", program, "../../hack/images/pause")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the pause image: %v: %s", err, out)
	}
	pause := file("pause", read(t, program))
	pause.Mode = 0o755
	return configured(t, func(c *ocispec.ImageConfig) { c.Entrypoint = []string{"/pause"} }, tarOf(t, pause)).push(t, reg, "pause")
}

// run runs a container of a pulled image to its end, in a pod of its own on the node's network, with the node's programs and runc: crun
// 1.8 knows no spec as new as containerd's. It returns what the container printed and why it ended, or an error's text.
func (p peerContainerd) run(ref string, asked func(*runtimeapi.ContainerConfig)) string {
	p.t.Helper()
	ctx, client := p.t.Context(), runtimeapi.NewRuntimeServiceClient(p.conn)
	own := &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE, Pid: runtimeapi.NamespaceMode_CONTAINER}
	pod := &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: "pod", Uid: "uid", Namespace: "field"},
		LogDirectory: p.t.TempDir(),
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent: testns.Cgroup(), SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: own},
		},
	}
	sandbox, err := client.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: pod})
	check(p.t, err)
	defer func() {
		_, err := client.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: sandbox.GetPodSandboxId()})
		check(p.t, err)
	}()
	config := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "container"},
		Image:    &runtimeapi.ImageSpec{Image: ref},
		LogPath:  "log",
		Mounts: []*runtimeapi.Mount{{HostPath: "/usr", ContainerPath: "/usr", Readonly: true},
			{HostPath: pod.LogDirectory, ContainerPath: "/log"}},
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources: &runtimeapi.LinuxContainerResources{}, SecurityContext: &runtimeapi.LinuxContainerSecurityContext{NamespaceOptions: own},
		},
	}
	if asked != nil {
		asked(config)
	}
	c, err := client.CreateContainer(ctx,
		&runtimeapi.CreateContainerRequest{PodSandboxId: sandbox.GetPodSandboxId(), Config: config, SandboxConfig: pod})
	if err != nil {
		return err.Error()
	}
	if _, err := client.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: c.GetContainerId()}); err != nil {
		return err.Error()
	}
	var reason string
	until.NoError(p.t, time.Minute, func() error {
		s, err := client.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: c.GetContainerId()})
		check(p.t, err)
		reason = s.GetStatus().GetReason()
		if state := s.GetStatus().GetState(); state != runtimeapi.ContainerState_CONTAINER_EXITED {
			return fmt.Errorf("the container is in the state %v", state)
		}
		return nil
	})
	var printed strings.Builder
	for line := range strings.Lines(read(p.t, filepath.Join(pod.LogDirectory, config.LogPath))) {
		_, text, _ := strings.Cut(strings.TrimSpace(line), " F ")
		printed.WriteString(strings.TrimSpace(text) + "; ")
	}
	return printed.String() + reason
}

// containers starts containers of images with a config of the field, and containers with a limit, a mount or a terminal.
func (c comparison) containers() {
	t := c.peer.t
	flags := t.TempDir()
	check(t, unix.Mount("flags", flags, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""))
	defer func() { check(t, unix.Unmount(flags, unix.MNT_DETACH)) }()
	root := tarOf(t, file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"), special("usr", tar.TypeDir, ""),
		special("bin", tar.TypeSymlink, "usr/bin"), special("lib", tar.TypeSymlink, "usr/lib"), special("lib64", tar.TypeSymlink, "usr/lib64"))
	for name, odd := range map[string]struct {
		script string // for a shell
		want   string // what run returns with Tripod
		image  func(*ocispec.ImageConfig)
		asked  func(*runtimeapi.ContainerConfig)
	}{
		"HOME without an entry": {script: "echo HOME=$HOME", want: "HOME=/; Completed", image: func(i *ocispec.ImageConfig) {
			i.User = "4321"
		}},
		"empty entrypoint": {script: "echo ran", want: "ran; Completed", image: func(i *ocispec.ImageConfig) {
			i.Entrypoint = []string{""}
		}},
		"relative volume": {script: "grep -o ' /data ' /proc/mounts", want: "/data; Completed", image: func(i *ocispec.ImageConfig) {
			i.Volumes = map[string]struct{}{"data": {}}
		}},
		"directory that no layer has": {script: "pwd", want: "/made/for/me; Completed", image: func(i *ocispec.ImageConfig) {
			i.WorkingDir = "/made/for/me"
		}},
		"USER of 2^32": {script: "id -u", image: func(i *ocispec.ImageConfig) { // Tripod refuses it in its own words
			i.User = "4294967296"
		}},
		"child without memory": {script: "dd if=/dev/zero of=/dev/null bs=200M count=1 & wait $!; sleep 1; exit 3", want: "Killed; Error",
			asked: func(c *runtimeapi.ContainerConfig) {
				c.Linux.Resources.MemoryLimitInBytes = 16 << 20
			}},
		"prompt on a terminal": {script: "printf 'name? '; sleep 1; test -s /log/log && echo shown || echo hidden", want: "shown; Completed",
			asked: func(c *runtimeapi.ContainerConfig) {
				c.Tty = true
			}},
		"flags of a mount": {
			script: "grep -o '/vol-.. tmpfs [a-z,]*relatime' /proc/mounts | sort",
			want:   "/vol-ro tmpfs ro,nosuid,nodev,noexec,relatime; /vol-rw tmpfs rw,nosuid,nodev,noexec,relatime; Completed",
			asked: func(c *runtimeapi.ContainerConfig) {
				c.Mounts = append(c.Mounts, &runtimeapi.Mount{HostPath: flags, ContainerPath: "/vol-ro", Readonly: true},
					&runtimeapi.Mount{HostPath: flags, ContainerPath: "/vol-rw"})
			},
		},
	} {
		ref := configured(t, func(i *ocispec.ImageConfig) {
			i.Cmd = []string{"/bin/sh", "-c", odd.script}
			if odd.image != nil {
				odd.image(i)
			}
		}, root).push(t, c.reg, "container")
		if !c.pull("container, "+name, ref) {
			continue
		}
		if answer := c.peer.run(ref, odd.asked); answer != odd.want {
			c.add("container, "+name, answer)
		}
	}
}
