package spec

import (
	"os"

	"path/filepath"
	"strconv"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	private  = runtimeapi.MountPropagation_PROPAGATION_PRIVATE
	slave    = runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER
	bidirect = runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL
)

func TestMountsRefused(t *testing.T) {
	image := &runtimeapi.ImageSpec{Image: "sha256:beef"}
	mapping := []*runtimeapi.IDMapping{{Length: 1}}
	noRRO := fullHost()
	noRRO.RecursiveReadOnly = false
	for _, c := range []struct {
		host  Host
		mount *runtimeapi.Mount
		class error
		field string
	}{
		{fullHost(), &runtimeapi.Mount{HostPath: "/tmp"}, errInvalid, "container_path"},
		{fullHost(), &runtimeapi.Mount{HostPath: "/tmp", ContainerPath: "rel"}, errInvalid, "container_path"},
		{fullHost(), &runtimeapi.Mount{HostPath: "/tmp", ContainerPath: "/a/.."}, errInvalid, "container_path"},
		{fullHost(), &runtimeapi.Mount{HostPath: "/tmp", ContainerPath: "/proc"}, errInvalid, "container_path"},
		{fullHost(), &runtimeapi.Mount{HostPath: "/tmp", ContainerPath: "/x/../proc/self/attr"}, errInvalid, "container_path"},
		{fullHost(), &runtimeapi.Mount{HostPath: "/tmp", ContainerPath: "/a\x00"}, errInvalid, "container_path"},
		{fullHost(), &runtimeapi.Mount{ContainerPath: "/a"}, errInvalid, "host_path"},
		{fullHost(), &runtimeapi.Mount{HostPath: "rel", ContainerPath: "/a"}, errInvalid, "host_path"},
		{fullHost(), &runtimeapi.Mount{HostPath: "/tmp", ContainerPath: "/a", Image: image, Readonly: true}, errInvalid, "exclude"},
		{fullHost(), &runtimeapi.Mount{ContainerPath: "/a", Image: image}, errInvalid, "readonly"},
		{fullHost(), &runtimeapi.Mount{ContainerPath: "/a", Image: image, Readonly: true, Propagation: slave}, errInvalid, "propagation"},
		{fullHost(), &runtimeapi.Mount{HostPath: "/tmp", ContainerPath: "/a", Propagation: 7}, errInvalid, "propagation"},
		{fullHost(), &runtimeapi.Mount{HostPath: "/tmp", ContainerPath: "/a", RecursiveReadOnly: true}, errInvalid, "recursive_read_only"},
		{fullHost(), &runtimeapi.Mount{HostPath: "/tmp", ContainerPath: "/a", RecursiveReadOnly: true, Readonly: true, Propagation: slave},
			errInvalid, "recursive_read_only"},
		{fullHost(), &runtimeapi.Mount{HostPath: "/tmp", ContainerPath: "/a", RecursiveReadOnly: true, Readonly: true, Propagation: bidirect},
			errInvalid, "recursive_read_only"},
		{noRRO, &runtimeapi.Mount{HostPath: "/tmp", ContainerPath: "/a", RecursiveReadOnly: true, Readonly: true}, errUnsupported,
			"recursive_read_only"},
		{fullHost(), &runtimeapi.Mount{HostPath: "/tmp", ContainerPath: "/a", UidMappings: mapping}, errInvalid, "uidMappings"},
		{fullHost(), &runtimeapi.Mount{HostPath: "/tmp", ContainerPath: "/a", GidMappings: mapping}, errInvalid, "uidMappings"},
		{fullHost(), &runtimeapi.Mount{HostPath: "/tmp", ContainerPath: "/a", MountOptions: []string{"exec"}}, errInvalid, "mount_options"},
	} {
		container := testContainer()
		container.Config.Mounts = []*runtimeapi.Mount{c.mount}
		requireRefused(t, Validate(testPod(), container, c.host), c.class, c.field)
		requireRefused(t, Validate(testPod(), container, c.host), c.class, "mounts[0]")
	}
	twice := []*runtimeapi.Mount{{HostPath: "/tmp", ContainerPath: "/a"}, {HostPath: "/tmp", ContainerPath: "/b/../a/"}}
	requireRefused(t, checkMounts(twice, nil, fullHost()), errInvalid, "mounts[1]")
	lxcfs := []*runtimeapi.Mount{{HostPath: "/tmp", ContainerPath: "/proc/meminfo"}}
	assert.NoError(t, checkMounts(lxcfs, nil, fullHost()))
}

// TestMountLeadsIntoProc tests fault I3: a symlink of the image in a mount's path.
func TestMountLeadsIntoProc(t *testing.T) {
	in := testInput(t)
	require.NoError(t, os.Symlink("/proc/self", filepath.Join(in.Rootfs, "data")))
	in.Container.Config.Mounts = []*runtimeapi.Mount{{HostPath: "/tmp", ContainerPath: "/data/attr"}}
	_, _, err := Build(in, fullHost())
	requireRefused(t, err, errInvalid, "/proc/self/attr")
}

func TestMountSource(t *testing.T) {
	dir := t.TempDir()
	in := testInput(t)
	source := func(name string) (string, error) {
		return mountSource("mounts[0]", in, &runtimeapi.Mount{HostPath: name, ContainerPath: "/a"})
	}
	got, err := source(filepath.Join(dir, "new/deep"))
	require.NoError(t, err)
	assert.DirExists(t, got)

	require.NoError(t, os.Symlink(filepath.Join(dir, "new"), filepath.Join(dir, "link")))
	got, err = source(filepath.Join(dir, "link/deep/"))
	require.NoError(t, err)
	assert.Equal(t, filepath.Join(dir, "new/deep"), got, "symlinks of the host are followed")

	writeFile(t, filepath.Join(dir, "file"), "")
	got, err = source(filepath.Join(dir, "file"))
	require.NoError(t, err)
	assert.Equal(t, filepath.Join(dir, "file"), got)
	_, err = source(filepath.Join(dir, "file/below"))
	requireRefused(t, err, errInvalid, "host_path")

	require.NoError(t, os.Symlink("/absent/anywhere", filepath.Join(dir, "dangling")))
	_, err = source(filepath.Join(dir, "dangling"))
	requireRefused(t, err, errInvalid, "host_path")
}

// TestPropagation uses real mounts, each on its own tmpfs.
func TestPropagation(t *testing.T) {
	mount := func(flags uintptr) string {
		dir := t.TempDir()
		require.NoError(t, unix.Mount("test", dir, "tmpfs", 0, ""))
		t.Cleanup(func() { assert.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
		require.NoError(t, unix.Mount("", dir, "", flags, ""))
		require.NoError(t, os.Mkdir(filepath.Join(dir, "sub"), 0o755))
		return filepath.Join(dir, "sub")
	}
	shared, alone := mount(unix.MS_SHARED), mount(unix.MS_PRIVATE)
	// A slave of a shared mount receives mounts but does not propagate its own.
	receiver := t.TempDir()
	require.NoError(t, unix.Mount(shared, receiver, "", unix.MS_BIND, ""))
	t.Cleanup(func() { assert.NoError(t, unix.Unmount(receiver, unix.MNT_DETACH)) })
	require.NoError(t, unix.Mount("", receiver, "", unix.MS_SLAVE, ""))

	for _, c := range []struct {
		source       string
		mode         runtimeapi.MountPropagation
		option, root string
	}{
		{alone, private, "rprivate", ""}, {shared, private, "rprivate", ""},
		{shared, slave, "rslave", "rslave"}, {receiver, slave, "rslave", "rslave"},
		{shared, bidirect, "rshared", "rshared"},
	} {
		in := testInput(t)
		in.Container.Config.Mounts = []*runtimeapi.Mount{{HostPath: c.source, ContainerPath: "/a", Propagation: c.mode}}
		s, _ := build(t, in, fullHost())
		m := findMount(t, s, "/a")
		assert.Equal(t, []string{"rbind", c.option, "rw"}, m.Options)
		assert.Equal(t, c.root, s.Linux.RootfsPropagation)
	}
	for source, mode := range map[string]runtimeapi.MountPropagation{alone: slave, receiver: bidirect} {
		_, err := propagation("mounts[0]", source, mode)
		requireRefused(t, err, errInvalid, "propagation")
	}
	_, err := propagation("mounts[0]", alone, bidirect)
	requireRefused(t, err, errInvalid, "propagation")

	in := testInput(t)
	in.Container.Config.Mounts = []*runtimeapi.Mount{
		{HostPath: shared, ContainerPath: "/a", Propagation: bidirect}, {HostPath: shared, ContainerPath: "/b", Propagation: slave},
	}
	s, _ := build(t, in, fullHost())
	assert.Equal(t, "rshared", s.Linux.RootfsPropagation, "a shared root also serves slave mounts")
}

func findMount(t *testing.T, s *specs.Spec, dest string) specs.Mount {
	t.Helper()
	for _, m := range s.Mounts {
		if m.Destination == dest {
			return m
		}
	}
	t.Fatalf("no mount at %s", dest)
	return specs.Mount{}
}

func TestMountOptions(t *testing.T) {
	in := testInput(t)
	dir := t.TempDir()
	in.ImageVolumes = map[string]string{"/img/": "/run/images/x", "/data": "/run/images/x"}
	in.Container.Config.Mounts = []*runtimeapi.Mount{
		{HostPath: dir, ContainerPath: "/ro", Readonly: true},
		{HostPath: dir, ContainerPath: "/rro", Readonly: true, RecursiveReadOnly: true},
		{HostPath: dir, ContainerPath: "/opts", MountOptions: []string{"nosuid", "noexec", "nosuid", "nodev"}},
		{HostPath: dir, ContainerPath: "/label", SelinuxRelabel: true},
		{ContainerPath: "/img/", Image: &runtimeapi.ImageSpec{Image: "sha256:x", ImageRef: "sha256:x"}, Readonly: true, RecursiveReadOnly: true},
		{ContainerPath: "/data", Image: &runtimeapi.ImageSpec{Image: "sha256:x"}, Readonly: true, MountOptions: []string{"noexec", "nodev"}},
	}
	s, resolved := build(t, in, fullHost())
	for dest, want := range map[string][]string{
		"/ro":    {"rbind", "rprivate", "ro"},
		"/rro":   {"rbind", "rprivate", "rro"},
		"/opts":  {"rbind", "rprivate", "rw", "nodev", "noexec", "nosuid"},
		"/label": {"rbind", "rprivate", "rw"},
		"/img":   {"rbind", "rprivate", "rro", "nodev", "nosuid"},
		"/data":  {"rbind", "rprivate", "ro", "nodev", "noexec", "nosuid"},
	} {
		assert.Equal(t, want, findMount(t, s, dest).Options, dest)
	}
	require.Len(t, resolved.Mounts, 6)
	assert.Equal(t, "sha256:x", resolved.Mounts[4].GetImage().GetImageRef())
}

func TestJoinMounts(t *testing.T) {
	at := func(paths ...string) (mounts []specs.Mount) {
		for _, p := range paths {
			mounts = append(mounts, specs.Mount{Destination: p})
		}
		return mounts
	}
	defaults := at("/proc", "/dev", "/dev/pts", "/dev/shm", "/sys", "/sys/fs/cgroup", "/etc/hosts")
	for name, c := range map[string]struct{ requested, want []specs.Mount }{
		"none": {nil, at("/proc", "/dev", "/sys", "/dev/pts", "/dev/shm", "/etc/hosts", "/sys/fs/cgroup")},
		"deep before parent": {at("/a/b/c", "/a"),
			at("/proc", "/dev", "/sys", "/a", "/dev/pts", "/dev/shm", "/etc/hosts", "/sys/fs/cgroup", "/a/b/c")},
		"replace":          {at("/dev/shm", "/etc/hosts"), at("/proc", "/dev", "/sys", "/dev/pts", "/dev/shm", "/etc/hosts", "/sys/fs/cgroup")},
		"whole /dev, /sys": {at("/sys", "/dev"), at("/proc", "/sys", "/dev", "/etc/hosts")},
		"/etc keeps hosts": {at("/etc"), at("/proc", "/dev", "/sys", "/etc", "/dev/pts", "/dev/shm", "/etc/hosts", "/sys/fs/cgroup")},
	} {
		assert.Equal(t, c.want, joinMounts(defaults, c.requested), name)
	}
}

func TestResolveSubPath(t *testing.T) {
	root := t.TempDir()
	writeFile(t, filepath.Join(root, "dir/file"), "")
	require.NoError(t, os.Symlink("/dir", filepath.Join(root, "abs")))
	require.NoError(t, os.Symlink("../../../dir/file", filepath.Join(root, "dir/up")))
	for sub, want := range map[string]string{"": "", "dir": "/dir", "dir/file": "/dir/file", "abs/file": "/dir/file", "dir/up": "/dir/file"} {
		got, err := ResolveSubPath(root, sub)
		require.NoError(t, err, sub)
		assert.Equal(t, root+want, got)
	}
	for _, sub := range []string{"absent", "/dir", "../dir", "dir/../..", "dir/file/below"} {
		_, err := ResolveSubPath(root, sub)
		requireRefused(t, err, errInvalid, "image_sub_path")
	}
}

func TestDevices(t *testing.T) {
	dir := t.TempDir()
	node := func(name string, mode uint32, major, minor uint32) string {
		file := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
		require.NoError(t, unix.Mknod(file, mode, int(unix.Mkdev(major, minor))))
		require.NoError(t, os.Chmod(file, os.FileMode(mode&0o777)))
		return file
	}
	char := node("char", unix.S_IFCHR|0o640, 1, 3)
	require.NoError(t, os.Chown(char, 5, 6))
	node("snd/a", unix.S_IFCHR|0o600, 1, 5)
	node("snd/deep/b", unix.S_IFBLK|0o600, 7, 9)
	writeFile(t, filepath.Join(dir, "snd/readme"), "no device")
	require.NoError(t, os.Symlink(char, filepath.Join(dir, "link")))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "empty"), 0o755))

	list, rules, err := devices(&runtimeapi.ContainerConfig{Devices: []*runtimeapi.Device{
		{HostPath: filepath.Join(dir, "link"), ContainerPath: "/dev/x/../one", Permissions: "r"},
		{HostPath: filepath.Join(dir, "snd"), ContainerPath: "/dev/snd", Permissions: "rwm"},
	}}, fullHost())
	require.NoError(t, err)
	allow := func(kind string, major, minor int64, access string) specs.LinuxDeviceCgroup {
		return specs.LinuxDeviceCgroup{Allow: true, Type: kind, Major: &major, Minor: &minor, Access: access}
	}
	assert.Equal(t, []specs.LinuxDeviceCgroup{
		{Allow: false, Access: "rwm"}, allow("c", 1, 3, "r"), allow("c", 1, 5, "rwm"), allow("b", 7, 9, "rwm"),
	}, rules)
	require.Len(t, list, 3)
	assert.Equal(t, specs.LinuxDevice{
		Path: "/dev/one", Type: "c", Major: 1, Minor: 3, FileMode: new(os.FileMode(0o640)), UID: new(uint32(5)), GID: new(uint32(6)),
	}, list[0])
	assert.Equal(t, "/dev/snd/a", list[1].Path)
	assert.Equal(t, "/dev/snd/deep/b", list[2].Path)

	for host, text := range map[string]string{"absent": "no such device", "snd/readme": "not a device", "empty": "contains no devices"} {
		_, _, err := devices(&runtimeapi.ContainerConfig{Devices: []*runtimeapi.Device{
			{HostPath: filepath.Join(dir, host), ContainerPath: "/dev/x", Permissions: "r"},
		}}, fullHost())
		requireRefused(t, err, errInvalid, "devices[0].host_path")
		require.ErrorContains(t, err, text)
	}
	for field, d := range map[string]*runtimeapi.Device{
		"permissions":            {HostPath: "/dev/null", ContainerPath: "/dev/x"},
		"permissions: \"rx\"":    {HostPath: "/dev/null", ContainerPath: "/dev/x", Permissions: "rx"},
		"host_path":              {HostPath: "null", ContainerPath: "/dev/x", Permissions: "r"},
		"container_path":         {HostPath: "/dev/null", ContainerPath: "x", Permissions: "r"},
		"container_path: /proc/": {HostPath: "/dev/null", ContainerPath: "/proc/kcore", Permissions: "r"},
	} {
		requireRefused(t, checkDevices([]*runtimeapi.Device{d}), errInvalid, field)
	}
}

// TestDirectoryOfTooManyDevices tests the limit of the walk over a requested directory.
func TestDirectoryOfTooManyDevices(t *testing.T) {
	dir := t.TempDir()

	for i := range maxDeviceFiles + 1 {
		writeFile(t, filepath.Join(dir, strconv.Itoa(i)), "")
	}
	_, err := devicesBelow(dir, "/dev/x", nil)
	require.ErrorContains(t, err, "more than")
}
