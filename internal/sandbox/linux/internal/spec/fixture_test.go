package spec

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/pkg/cap"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// fullHost supports everything. A test removes the support that it examines.
func fullHost() Host {
	return Host{
		Controllers: map[string]bool{
			"blkio": true, "cpu": true, "cpuset": true, "devices": true, "hugetlb": true, "memory": true, "pids": true,
		},
		HugepageSizes: []string{"2MB", "1GB"}, SwapAccounting: true, CPUQuota: true,
		Seccomp: true, OwnOOMScore: -1000, Caps: cap.Known(), RecursiveReadOnly: true,
		Name: "node", root: "/",
	}
}

func testPod() *sandbox.Pod {
	return &sandbox.Pod{ID: "0123456789abcdef", Config: &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "shop", Uid: "u-1"},
		Hostname: "web-0",
		Linux:    &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{}},
	}}
}

func testContainer() *sandbox.Container {
	return &sandbox.Container{ID: "fedcba9876543210", Config: &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "nginx"},
		Image:    &runtimeapi.ImageSpec{Image: "sha256:1234"},
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources:       &runtimeapi.LinuxContainerResources{},
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{NamespaceOptions: &runtimeapi.NamespaceOption{}},
		},
	}}
}

// testInput returns a valid container with the test's own root file system.
func testInput(t testing.TB) Input {
	return Input{
		Pod: testPod(), Container: testContainer(), Rootfs: testRootfs(t),
		Image: ocispec.ImageConfig{Entrypoint: []string{"/entry"}, Cmd: []string{"serve"}, Env: []string{"PATH=/bin", "LANG=C"}},
		Net:   "/run/ns/net", IPC: "/run/ns/ipc", UTS: "/run/ns/uts", PID: "/run/ns/pid",
		CgroupsPath: "/kubepods/fedcba9876543210", ShmPath: "/run/pod/shm",
		ResolvConf: "/run/pod/resolv.conf", Hosts: "/run/pod/hosts", HostnameFile: "/run/pod/hostname",
	}
}

const (
	testPasswd = "root:x:0:0:root:/root:/bin/sh\n" +
		"app:x:1000:1001:App:/home/app:/bin/sh\n" +
		"4242:x:7:7:a name that is a number:/:/bin/sh\n" +
		"huge:x:4294967296:5:overflows to root:/:/bin/sh\n" +
		"minus:x:-1:5::/:/bin/sh\n" +
		"junk\n"
	testGroup = "root:x:0:\napp:x:1001:\nextra:x:50000:app,other\nmore:x:50001:other,app\nhugegroup:x:99999999999:\nalien:x:60000:other\n"
)

// testRootfs creates a small root file system with users and groups.
func testRootfs(t testing.TB) string {
	root := t.TempDir()
	writeFile(t, filepath.Join(root, "etc/passwd"), testPasswd)
	writeFile(t, filepath.Join(root, "etc/group"), testGroup)
	return root
}

func writeFile(t testing.TB, name, text string) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o755))
	require.NoError(t, os.WriteFile(name, []byte(text), 0o644))
}

func build(t testing.TB, in Input, h Host) (*specs.Spec, sandbox.Resolved) {
	t.Helper()
	s, r, err := Build(in, h)
	require.NoError(t, err)
	return s, r
}

func int64Value(n int64) *runtimeapi.Int64Value { return &runtimeapi.Int64Value{Value: n} }

func localhostProfile(ref string) *runtimeapi.SecurityProfile {
	return &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: ref}
}

// requireRefused checks that err is of the class and names the field.
func requireRefused(t *testing.T, err, class error, field string) {
	t.Helper()
	require.ErrorIs(t, err, class)
	require.ErrorContains(t, err, field)
}

var (
	errInvalid     = errdefs.ErrInvalidArgument
	errUnsupported = errdefs.ErrNotImplemented
)

func toJSON(t testing.TB, v any) string {
	t.Helper()
	text, err := json.MarshalIndent(v, "", "  ")
	require.NoError(t, err)
	return string(text) + "\n"
}
