package spec

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/selinux"
)

// mountOptions are the valid values of a request's mount_options.
var mountOptions = []string{"nodev", "noexec", "nosuid"}

// procFiles are the only files below /proc on which something can be mounted. They are the files that lxcfs provides. A
// mount on any other file could replace a file that the runtime uses to confine the container (CVE-2019-19921).
var procFiles = []string{
	"/proc/cpuinfo", "/proc/diskstats", "/proc/loadavg", "/proc/meminfo", "/proc/slabinfo", "/proc/stat",
	"/proc/swaps", "/proc/uptime",
}

// defaultMounts returns the mounts that Linux programs expect (runtime-spec, config-linux.md) and the pod's /etc files.
func defaultMounts(in Input, m Modes) ([]specs.Mount, error) {
	sc := in.Container.Config.GetLinux().GetSecurityContext()
	kernel := "ro"
	if sc.GetPrivileged() {
		kernel = "rw"
	}
	shm, err := sharedMemory(in, m)
	if err != nil {
		return nil, err
	}
	mounts := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts",
			Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		shm,
		sysfs(in, m, kernel),
		{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"nosuid", "noexec", "nodev", "relatime", kernel}},
	}
	access := "rw"
	if sc.GetReadonlyRootfs() {
		access = "ro"
	}
	for _, file := range []struct{ dest, source string }{
		{"/etc/hosts", in.Hosts}, {"/etc/resolv.conf", in.ResolvConf}, {"/etc/hostname", in.HostnameFile},
	} {
		if file.source != "" {
			mounts = append(mounts, specs.Mount{
				Destination: file.dest, Type: "bind", Source: file.source, Options: []string{"rbind", "rprivate", access, "nosuid", "noexec", "nodev"},
			})
		}
	}
	return mounts, nil
}

// sysfs returns the mount of /sys. Only the user namespace that owns a network namespace can mount a sysfs for it, so a
// pod with a user namespace on the host network gets the node's mount.
func sysfs(in Input, m Modes, access string) specs.Mount {
	mount := specs.Mount{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", access}}
	if in.Pod.IDMap() != nil && m.Network == runtimeapi.NamespaceMode_NODE {
		mount.Type, mount.Source, mount.Options = "bind", "/sys", append([]string{"bind", "rprivate"}, mount.Options...)
	}
	return mount
}

// sharedMemory returns the mount of /dev/shm. Containers that share an IPC namespace also share /dev/shm.
func sharedMemory(in Input, m Modes) (specs.Mount, error) {
	const dest = "/dev/shm"
	source := in.ShmPath
	switch m.IPC {
	case runtimeapi.NamespaceMode_CONTAINER:
		return specs.Mount{Destination: dest, Type: "tmpfs", Source: "shm",
			Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=65536k"}}, nil
	case runtimeapi.NamespaceMode_NODE:
		source = dest
	}
	if source == "" {
		return specs.Mount{}, fmt.Errorf("container %s: the path of the pod's /dev/shm was not given", in.Container.ID)
	}
	return specs.Mount{Destination: dest, Type: "bind", Source: source,
		Options: []string{"rbind", "rprivate", "rw", "nosuid", "noexec", "nodev"}}, nil
}

// checkMounts rejects invalid mounts without reading the host's files.
func checkMounts(mounts []*runtimeapi.Mount, ids *sandbox.IDMap, h Host) error {
	seen := map[string]bool{}
	for i, m := range mounts {
		field := fmt.Sprintf("mounts[%d]", i)
		dest := path.Clean(m.GetContainerPath())
		if err := checkDestination(field+".container_path", m.GetContainerPath()); err != nil {
			return err
		}
		if seen[dest] {
			return invalid(field+".container_path", "%s is mounted twice", dest)
		}
		seen[dest] = true
		if err := checkSource(field, m); err != nil {
			return err
		}
		if err := checkMountMode(field, m, h); err != nil {
			return err
		}
		if err := checkMountOwners(field, m, ids); err != nil {
			return err
		}
	}
	return nil
}

func checkDestination(field, dest string) error {
	clean := path.Clean(dest)
	switch {
	case !path.IsAbs(dest):
		return invalid(field, "%q is not absolute", dest)
	case clean == "/":
		return invalid(field, "the root of the container cannot be mounted over")
	case below(clean, "/proc") && !slices.Contains(procFiles, clean):
		return invalid(field, "%s: nothing can be mounted there", clean)
	}
	return checkText(field, dest)
}

func checkSource(field string, m *runtimeapi.Mount) error {
	if m.GetImage().GetImage() != "" {
		switch {
		case m.GetHostPath() != "":
			return invalid(field, "host_path and image exclude each other")
		case !m.GetReadonly():
			return invalid(field+".readonly", "an image can only be mounted read-only")
		case m.GetPropagation() != runtimeapi.MountPropagation_PROPAGATION_PRIVATE:
			return invalid(field+".propagation", "an image can only be mounted with PROPAGATION_PRIVATE")
		}
		return checkText(field+".image_sub_path", m.GetImageSubPath())
	}
	switch {
	case m.GetHostPath() == "":
		return invalid(field+".host_path", "must be set unless image is")
	case !filepath.IsAbs(m.GetHostPath()):
		return invalid(field+".host_path", "%q is not absolute", m.GetHostPath())
	}
	return checkText(field+".host_path", m.GetHostPath())
}

func checkMountMode(field string, m *runtimeapi.Mount, h Host) error {
	if _, ok := runtimeapi.MountPropagation_name[int32(m.GetPropagation())]; !ok {
		return invalid(field+".propagation", "unknown mode %d", m.GetPropagation())
	}
	if m.GetRecursiveReadOnly() {
		switch {
		case !m.GetReadonly():
			return invalid(field+".recursive_read_only", "needs readonly too")
		case m.GetPropagation() != runtimeapi.MountPropagation_PROPAGATION_PRIVATE:
			return invalid(field+".recursive_read_only", "needs PROPAGATION_PRIVATE")
		case !h.RecursiveReadOnly:
			return unsupported(field+".recursive_read_only", "needs Linux 5.12 and an OCI runtime that knows the mount option rro")
		}
	}
	for _, option := range m.GetMountOptions() {
		if !slices.Contains(mountOptions, option) {
			return invalid(field+".mount_options", "%q is not one of %s", option, strings.Join(mountOptions, ", "))
		}
	}
	return nil
}

// checkMountOwners checks what depends on the pod's user namespace. A mount with the pod's mappings shows the node's
// files with the owners that they have on the node; without mappings, the owners are unknown in the pod.
func checkMountOwners(field string, m *runtimeapi.Mount, ids *sandbox.IDMap) error {
	switch mapped := mapsOwners(m); {
	case mapped && ids == nil:
		return invalid(field+".uidMappings", "the pod has no user namespace")
	case mapped && !ids.SameMappings(m.GetUidMappings(), m.GetGidMappings()):
		return invalid(field+".uidMappings", "the mappings of users and groups must be those of the pod's user namespace")
	case ids != nil && m.GetPropagation() == runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL:
		return unsupported(field+".propagation", "mounts made in a user namespace do not reach the node; use PROPAGATION_HOST_TO_CONTAINER")
	}
	return nil
}

func mapsOwners(m *runtimeapi.Mount) bool { return len(m.GetUidMappings())+len(m.GetGidMappings()) > 0 }

// requestedMounts returns the request's mounts, the propagation that the root file system needs for them, and the
// mounts as ContainerStatus reports them.
func requestedMounts(in Input) (mounts []specs.Mount, reported []*runtimeapi.Mount, rootfs string, err error) {
	for i, m := range in.Container.Config.GetMounts() {
		field := fmt.Sprintf("mounts[%d]", i)
		dest := path.Clean(m.GetContainerPath())
		real, err := insideRoot(in.Rootfs, dest)
		if err != nil {
			return nil, nil, "", classifyFileError(field+".container_path", err)
		}
		if below(real, "/proc") && !slices.Contains(procFiles, real) {
			return nil, nil, "", invalid(field+".container_path", "%s leads to %s in the image, where nothing can be mounted", dest, real)
		}
		source, err := mountSource(field, in, m)
		if err != nil {
			return nil, nil, "", err
		}
		propagation, err := propagation(field, source, m.GetPropagation())
		if err != nil {
			return nil, nil, "", err
		}
		// The root mount must not block the propagation. A shared root also works for slave mounts.
		if propagation == "rshared" || propagation == "rslave" && rootfs == "" {
			rootfs = propagation
		}
		own := int64(0)
		if m.GetImage().GetImage() == "" {
			if own, err = ownFlags(source); err != nil {
				return nil, nil, "", classifyFileError(field+".host_path", err)
			}
		}
		mount := specs.Mount{
			Destination: dest, Type: "bind", Source: source,
			Options: slices.Concat([]string{"rbind", propagation, access(m, own)}, bindOptions(m, own)),
		}
		if m.GetImage().GetImage() == "" && mapsOwners(m) {
			mount.UIDMappings, mount.GIDMappings = mappings(in.Pod.IDMap())
		}
		mounts = append(mounts, mount)
		reported = append(reported, proto.CloneOf(m))
	}
	return mounts, reported, rootfs, nil
}

// Relabel gives the label of files to the mounts that ask for it (selinux_relabel). It has no effect on a host without
// SELinux, where the label is "", and none on images, which are mounted with a label. Build does not do it, because it
// takes long, and because the specification of a container that is not yet made changes nothing.
func Relabel(c *runtimeapi.ContainerConfig, label string) error {
	for i, m := range c.GetMounts() {
		if !m.GetSelinuxRelabel() || m.GetImage().GetImage() != "" || label == "" {
			continue
		}
		source, err := filepath.EvalSymlinks(m.GetHostPath())
		if err == nil {
			err = selinux.Relabel(source, label)
		}
		if err != nil {
			return classifyFileError(fmt.Sprintf("mounts[%d].selinux_relabel", i), err)
		}
	}
	return nil
}

// ownFlags returns the flags of the mount that contains a path (statfs(2), f_flags). A bind mount inherits them, but the runtime
// changes its flags once more, and what is not repeated then is lost or, in a user namespace, refused by the kernel, because
// the flags are locked there (mount_namespaces(7)).
func ownFlags(source string) (flags int64, err error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(source, &fs); err != nil {
		return 0, &os.PathError{Op: "statfs", Path: source, Err: err}
	}
	return int64(fs.Flags), nil
}

func access(m *runtimeapi.Mount, own int64) string {
	switch {
	case m.GetRecursiveReadOnly():
		return "rro"
	case m.GetReadonly(), own&unix.ST_RDONLY != 0:
		return "ro"
	}
	return "rw"
}

// bindOptions returns the mount options of the request. In an image volume, devices and set-user-ID bits have no
// effect. The volume's programs can run, because image volumes often contain tools. A pod can request noexec. The mount keeps
// its own flags.
func bindOptions(m *runtimeapi.Mount, own int64) []string {
	options := slices.Clone(m.GetMountOptions())
	for flag, option := range map[int64]string{unix.ST_NOSUID: "nosuid", unix.ST_NODEV: "nodev", unix.ST_NOEXEC: "noexec"} {
		if own&flag != 0 {
			options = append(options, option)
		}
	}
	if m.GetImage().GetImage() != "" {
		options = append(options, "nodev", "nosuid")
	}
	slices.Sort(options)
	return slices.Compact(options)
}

// mountSource returns the host path to bind: the mounted image, or the request's host_path with symlinks resolved. It
// creates a missing directory, as kubelets expect.
func mountSource(field string, in Input, m *runtimeapi.Mount) (string, error) {
	if m.GetImage().GetImage() != "" {
		source, ok := in.ImageVolumes[m.GetContainerPath()]
		if !ok {
			return "", fmt.Errorf("%s: image %s was not mounted for %s", field, m.GetImage().GetImage(), m.GetContainerPath())
		}
		return source, nil
	}
	name := filepath.Clean(m.GetHostPath())
	if _, err := os.Stat(name); errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(name, 0o755); err != nil {
			return "", classifyFileError(field+".host_path", fmt.Errorf("%s does not exist and cannot be made: %w", name, err))
		}
	}
	real, err := filepath.EvalSymlinks(name)
	if err != nil {
		return "", classifyFileError(field+".host_path", err)
	}
	return real, nil
}

// propagation returns the mount option for the given propagation mode. It rejects a source on a mount that does not
// propagate in this way, because the kernel would accept the option but ignore it.
func propagation(field, source string, mode runtimeapi.MountPropagation) (string, error) {
	if mode == runtimeapi.MountPropagation_PROPAGATION_PRIVATE {
		return "rprivate", nil
	}
	peers, err := peerGroups(source)
	if err != nil {
		return "", fmt.Errorf("%s.propagation: %w", field, err)
	}
	shared, slave := strings.Contains(peers, "shared:"), strings.Contains(peers, "master:")
	switch {
	case mode == runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL && !shared:
		return "", invalid(field+".propagation", "%s is not on a shared mount of the node (make it so: mount --make-rshared)", source)
	case mode == runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL:
		return "rshared", nil
	case !shared && !slave:
		return "", invalid(field+".propagation", "%s is not on a shared or slave mount of the node (make it so: mount --make-rshared)", source)
	}
	return "rslave", nil
}

// peerGroups returns the optional fields (shared:N master:N) of the mount that contains a path; see
// proc_pid_mountinfo(5).
func peerGroups(name string) (string, error) {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, name, 0, unix.STATX_MNT_ID, &st); err != nil {
		return "", &fs.PathError{Op: "statx", Path: name, Err: err}
	}
	found, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		is := uint64(m.ID) == st.Mnt_id
		return !is, is
	})
	if err != nil {
		return "", fmt.Errorf("read the node's mounts: %w", err)
	}
	if len(found) == 0 {
		return "", fmt.Errorf("no mount of the node contains %s", name)
	}
	return found[0].Optional, nil
}

// joinMounts returns the default and the requested mounts, sorted so that no mount hides an earlier one. A requested
// mount replaces the default mount at the same path. A requested mount at /dev or /sys also replaces the default mounts
// below it.
func joinMounts(defaults, requested []specs.Mount) []specs.Mount {
	replaced := func(d specs.Mount) bool {
		return slices.ContainsFunc(requested, func(r specs.Mount) bool {
			whole := r.Destination == "/dev" || r.Destination == "/sys"
			return d.Destination == r.Destination || whole && below(d.Destination, r.Destination)
		})
	}
	all := append(slices.DeleteFunc(slices.Clone(defaults), replaced), requested...)
	depth := func(m specs.Mount) int { return strings.Count(m.Destination, "/") }
	slices.SortStableFunc(all, func(a, b specs.Mount) int { return depth(a) - depth(b) })
	return all
}
