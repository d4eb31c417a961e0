package spec

import (
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// FuzzBuild tests fault C1 for this package: no message causes a panic, and every error is errdefs.ErrInvalidArgument
// or errdefs.ErrNotImplemented.
func FuzzBuild(f *testing.F) {
	seed := func(p *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig) {
		pod, err := proto.Marshal(p)
		require.NoError(f, err)
		container, err := proto.Marshal(c)
		require.NoError(f, err)
		f.Add(pod, container, "app:extra", "/work")
	}
	seed(&runtimeapi.PodSandboxConfig{}, &runtimeapi.ContainerConfig{})
	seed(testPod().Config, testContainer().Config)
	full := testContainer().Config
	full.Command, full.Tty = []string{"a"}, true
	full.Envs = []*runtimeapi.KeyValue{{Key: "A", Value: []byte("b")}}
	full.Mounts = []*runtimeapi.Mount{{HostPath: "/tmp", ContainerPath: "/x", Propagation: 1}}
	full.Devices = []*runtimeapi.Device{{HostPath: "/dev/null", ContainerPath: "/dev/x", Permissions: "rwm"}}
	full.Linux.Resources = &runtimeapi.LinuxContainerResources{
		HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB"}}, Unified: map[string]string{"memory.max": "1"}, CpusetCpus: "0",
	}
	full.Linux.SecurityContext = &runtimeapi.LinuxContainerSecurityContext{
		RunAsUser: int64Value(1), SupplementalGroups: []int64{5}, Seccomp: &runtimeapi.SecurityProfile{},
		Capabilities: &runtimeapi.Capability{AddCapabilities: []string{"ALL"}}, MaskedPaths: []string{"/a"},
	}
	seed(testPod().Config, full)

	f.Fuzz(func(t *testing.T, podBytes, containerBytes []byte, imageUser, imageDir string) {
		pod, container := testPod(), testContainer()
		if proto.Unmarshal(podBytes, pod.Config) != nil || proto.Unmarshal(containerBytes, container.Config) != nil {
			return
		}
		checkClass(t, Validate(pod, nil, fullHost()))
		in := testInput(t)
		in.Pod, in.Container = pod, container
		in.Image.User, in.Image.WorkingDir = imageUser, imageDir
		confine(t, in.Container)
		in.ImageVolumes = map[string]string{}
		for _, m := range container.Config.GetMounts() {
			in.ImageVolumes[m.GetContainerPath()] = "/run/image"
		}
		s, _, err := Build(in, fullHost())
		checkClass(t, err)
		if err == nil {
			require.NotEmpty(t, s.Process.Args)
			require.NotEmpty(t, s.Mounts)
			toJSON(t, s)
		}
	})
}

func checkClass(t *testing.T, err error) {
	t.Helper()
	if err != nil && !errdefs.IsInvalidArgument(err) && !errdefs.IsNotImplemented(err) {
		t.Fatalf("got error %v, want ErrInvalidArgument or ErrNotImplemented", err)
	}
}

// confine moves host paths below the test's own directory, because Build creates missing directories.
func confine(t *testing.T, c *sandbox.Container) {
	dir := t.TempDir()
	for _, m := range c.Config.GetMounts() {
		if filepath.IsAbs(m.GetHostPath()) {
			m.HostPath = filepath.Join(dir, m.GetHostPath())
		}
	}
	for _, d := range c.Config.GetDevices() {
		if filepath.IsAbs(d.GetHostPath()) && d.GetHostPath() != "/dev/null" {
			d.HostPath = filepath.Join(dir, d.GetHostPath())
		}
	}
}
