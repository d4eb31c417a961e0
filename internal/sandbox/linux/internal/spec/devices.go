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
	"syscall"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// maxDeviceFiles limits the files below a requested directory, whether they are devices or not.
const maxDeviceFiles = 4096

// notShared are the entries of /dev that a privileged container does not share with the host.
var notShared = []string{"console", "fd", "mqueue", "pts", "shm"}

// checkDevices checks the form of the requested devices without reading the host's files.
func checkDevices(devices []*runtimeapi.Device) error {
	for i, d := range devices {
		field := fmt.Sprintf("devices[%d]", i)
		for name, p := range map[string]string{"host_path": d.GetHostPath(), "container_path": d.GetContainerPath()} {
			if !path.IsAbs(p) {
				return invalid(field+"."+name, "%q is not absolute", p)
			}
			if err := checkText(field+"."+name, p); err != nil {
				return err
			}
		}
		if dest := path.Clean(d.GetContainerPath()); dest == "/" || below(dest, "/proc") || below(dest, "/sys") {
			return invalid(field+".container_path", "%s cannot be a device", dest)
		}
		if p := d.GetPermissions(); p == "" || strings.Trim(p, "rwm") != "" {
			return invalid(field+".permissions", "%q is not made of r, w and m", p)
		}
	}
	return nil
}

// devices returns the device nodes to create in the container and the device rules of its cgroup. The OCI runtime adds
// the basic nodes (null, zero, random, tty …). A privileged container has the host's nodes and can use any device.
func devices(c *runtimeapi.ContainerConfig, h Host) ([]specs.LinuxDevice, []specs.LinuxDeviceCgroup, error) {
	nodes := map[string]specs.LinuxDevice{}
	rules := []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}
	privileged := c.GetLinux().GetSecurityContext().GetPrivileged()
	if privileged {
		rules = []specs.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}
		found, err := devicesBelow(h.path("dev"), "/dev", notShared)
		if err != nil {
			return nil, nil, fmt.Errorf("list the node's devices: %w", err)
		}
		for _, d := range found {
			nodes[d.Path] = d
		}
	}
	for i, d := range c.GetDevices() {
		field := fmt.Sprintf("devices[%d].host_path", i)
		found, err := devicesAt(d.GetHostPath(), path.Clean(d.GetContainerPath()))
		if err != nil {
			return nil, nil, classifyFileError(field, err)
		}
		for _, node := range found {
			nodes[node.Path] = node
			if !privileged {
				rules = append(rules, specs.LinuxDeviceCgroup{
					Allow: true, Type: node.Type, Major: &node.Major, Minor: &node.Minor, Access: d.GetPermissions(),
				})
			}
		}
	}
	list := make([]specs.LinuxDevice, 0, len(nodes))
	for _, node := range nodes {
		list = append(list, node)
	}
	slices.SortFunc(list, func(a, b specs.LinuxDevice) int { return strings.Compare(a.Path, b.Path) })
	return list, rules, nil
}

// devicesAt returns the device at a host path. If the path is a directory, devicesAt returns all devices below it.
func devicesAt(host, dest string) ([]specs.LinuxDevice, error) {
	real, err := filepath.EvalSymlinks(host)
	if err != nil {
		return nil, fmt.Errorf("no such device on this node: %w", err)
	}
	info, err := os.Stat(real)
	if err != nil {
		return nil, fmt.Errorf("no such device on this node: %w", err)
	}
	if info.IsDir() {
		found, err := devicesBelow(real, dest, nil)
		if err == nil && len(found) == 0 {
			err = fmt.Errorf("%s contains no devices", host)
		}
		return found, err
	}
	node, ok := device(info, dest)
	if !ok {
		return nil, fmt.Errorf("%s is not a device (%s)", host, info.Mode().Type())
	}
	return []specs.LinuxDevice{node}, nil
}

// devicesBelow returns the devices below a host directory. It leaves out the entries that are named in skip, and
// everything below these.
func devicesBelow(dir, dest string, skip []string) ([]specs.LinuxDevice, error) {
	var found []specs.LinuxDevice
	entries := 0
	err := filepath.WalkDir(dir, func(name string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil // removed since it was listed
		}
		if err != nil {
			return err
		}
		if entries++; entries > maxDeviceFiles {
			return fmt.Errorf("%s contains more than %d files", dir, maxDeviceFiles)
		}
		relative := strings.TrimPrefix(strings.TrimPrefix(name, dir), "/")
		if slices.Contains(skip, relative) {
			if e.IsDir() {
				return fs.SkipDir
			}
			return nil
		}
		if e.Type()&fs.ModeDevice == 0 {
			return nil
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if node, ok := device(info, path.Join(dest, relative)); ok {
			found = append(found, node)
		}
		return nil
	})
	return found, err
}

// device returns the container's copy of a device node of the host, with the same owner and mode. The second result is
// false if the file is not a device.
func device(info fs.FileInfo, dest string) (node specs.LinuxDevice, ok bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok || info.Mode()&fs.ModeDevice == 0 {
		return specs.LinuxDevice{}, false
	}
	kind := "b"
	if info.Mode()&fs.ModeCharDevice != 0 {
		kind = "c"
	}
	return specs.LinuxDevice{
		Path: dest, Type: kind,
		Major: int64(unix.Major(st.Rdev)), Minor: int64(unix.Minor(st.Rdev)),
		FileMode: new(info.Mode().Perm()), UID: &st.Uid, GID: &st.Gid,
	}, true
}
