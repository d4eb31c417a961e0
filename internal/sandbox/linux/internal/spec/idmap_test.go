package spec

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

func users(first, length uint32) *runtimeapi.UserNamespace {
	r := []*runtimeapi.IDMapping{{HostId: first, Length: length}}
	return &runtimeapi.UserNamespace{Uids: r, Gids: r}
}

// podInUsers returns a pod with a user namespace.
func podInUsers() *sandbox.Pod {
	p := testPod()
	p.Config.Linux.SecurityContext.NamespaceOptions = &runtimeapi.NamespaceOption{
		Pid: runtimeapi.NamespaceMode_CONTAINER, UsernsOptions: users(1<<20, 1<<16),
	}
	return p
}

func TestUserNamespaceRefused(t *testing.T) {
	p := podInUsers()
	require.NoError(t, Validate(p, nil, fullHost()))
	host := fullHost()
	host.UserNamespaces = errors.New("the kernel has none")
	requireRefused(t, Validate(p, nil, host), errUnsupported, "the kernel has none")
	options := p.Config.Linux.SecurityContext.NamespaceOptions
	options.Pid = runtimeapi.NamespaceMode_NODE
	requireRefused(t, Validate(p, nil, fullHost()), errInvalid, "namespace_options.pid")
	options.Pid, options.Ipc = runtimeapi.NamespaceMode_CONTAINER, runtimeapi.NamespaceMode_NODE
	requireRefused(t, Validate(p, nil, fullHost()), errInvalid, "namespace_options.ipc")
	options.Ipc, options.Network = runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_NODE
	require.NoError(t, Validate(p, nil, fullHost()))
}

func TestContainerUserNamespaceRefused(t *testing.T) {
	host := users(0, 0)
	host.Mode, host.Uids, host.Gids = runtimeapi.NamespaceMode_NODE, nil, nil
	for name, c := range map[string]struct {
		pod     *sandbox.Pod
		options *runtimeapi.UserNamespace
		refused bool
	}{
		"none in a pod with one":       {podInUsers(), nil, false},
		"the pod's":                    {podInUsers(), users(1<<20, 1<<16), false},
		"the pod's, without a mapping": {podInUsers(), &runtimeapi.UserNamespace{}, false},
		"another":                      {podInUsers(), users(1<<21, 1<<16), true},
		"the node's":                   {podInUsers(), host, true},
		"the node's in such a pod":     {testPod(), host, false},
		"one in a pod without":         {testPod(), users(1<<20, 1<<16), true},
	} {
		container := testContainer()
		container.Config.Linux.SecurityContext.NamespaceOptions = &runtimeapi.NamespaceOption{UsernsOptions: c.options}
		if err := Validate(c.pod, container, fullHost()); c.refused {
			requireRefused(t, err, errInvalid, "userns_options")
		} else {
			assert.NoError(t, err, name)
		}
	}
}

func TestMountsInUserNamespace(t *testing.T) {
	own, other := users(1<<20, 1<<16).Uids, users(1<<21, 1<<16).Uids
	for _, c := range []struct {
		mount *runtimeapi.Mount
		class error
		field string
	}{
		{&runtimeapi.Mount{UidMappings: own}, errInvalid, "uidMappings"},
		{&runtimeapi.Mount{UidMappings: own, GidMappings: other}, errInvalid, "uidMappings"},
		{&runtimeapi.Mount{Propagation: runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL}, errUnsupported, "propagation"},
	} {
		container := testContainer()
		c.mount.HostPath, c.mount.ContainerPath = "/tmp", "/a"
		container.Config.Mounts = []*runtimeapi.Mount{c.mount}
		requireRefused(t, Validate(podInUsers(), container, fullHost()), c.class, "mounts[0]."+c.field)
	}
}

// TestBuildInUserNamespace: the specification has the mappings and the namespace, and marks the mounts to be mapped.
func TestBuildInUserNamespace(t *testing.T) {
	in := testInput(t)
	in.Pod, in.User = podInUsers(), "/run/user"
	own := users(1<<20, 1<<16).Uids
	in.Container.Config.Mounts = []*runtimeapi.Mount{
		{HostPath: t.TempDir(), ContainerPath: "/mapped", UidMappings: own, GidMappings: own},
		{HostPath: t.TempDir(), ContainerPath: "/plain"},
	}
	in.Image.Volumes = map[string]struct{}{"/made/here": {}}
	require.NoError(t, os.Chown(in.Rootfs, 1<<20, 1<<20))
	s, _, err := Build(in, fullHost())
	require.NoError(t, err)
	mapping := []specs.LinuxIDMapping{{HostID: 1 << 20, Size: 1 << 16}}
	assert.Equal(t, mapping, s.Linux.UIDMappings)
	assert.Equal(t, mapping, s.Linux.GIDMappings)
	assert.Contains(t, s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace, Path: "/run/user"})
	for _, m := range s.Mounts {
		if m.Destination == "/mapped" {
			assert.Equal(t, mapping, m.UIDMappings)
		} else {
			assert.Nil(t, m.UIDMappings, m.Destination)
		}
	}
	for _, name := range []string{"made", "made/here"} {
		info, err := os.Stat(filepath.Join(in.Rootfs, name))
		require.NoError(t, err)
		assert.Equal(t, uint32(1<<20), info.Sys().(*syscall.Stat_t).Uid, name)
	}

	in.Container.Config.Linux.SecurityContext.RunAsUser = int64Value(1 << 16)
	_, _, err = Build(in, fullHost())
	requireRefused(t, err, errInvalid, "run_as_user")
}

// TestVolumeInAnotherUsersDirectory: the node makes the directories of volumes whoever owns their parents.
func TestVolumeInAnotherUsersDirectory(t *testing.T) {
	in := testInput(t)
	in.Pod, in.User = podInUsers(), "/run/user"
	in.Image.Volumes = map[string]struct{}{"/srv/data": {}}
	parent := filepath.Join(in.Rootfs, "srv")
	require.NoError(t, os.Mkdir(parent, 0o755))
	require.NoError(t, os.Chown(parent, 1<<20+1000, 1<<20+1000))
	_, _, err := Build(in, fullHost())
	require.NoError(t, err)
	info, err := os.Stat(filepath.Join(parent, "data"))
	require.NoError(t, err)
	assert.Equal(t, uint32(1<<20), info.Sys().(*syscall.Stat_t).Uid)
}

// TestSysfsOfTheNode: a pod with a user namespace on the host network cannot mount a sysfs of its own.
func TestSysfsOfTheNode(t *testing.T) {
	in := testInput(t)
	in.Pod = podInUsers()
	in.Pod.Config.Linux.SecurityContext.NamespaceOptions.Network = runtimeapi.NamespaceMode_NODE
	s, _, err := Build(in, fullHost())
	require.NoError(t, err)
	for _, m := range s.Mounts {
		if m.Destination == "/sys" {
			assert.Equal(t, "bind", m.Type)
			assert.Contains(t, m.Options, "ro")
		}
	}
}
