package guestinit

import (
	"errors"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// moduleList is the file with the kernel modules' paths, one a line, each module after those that it needs.
const moduleList = "/etc/modules.tripod"

// loadModules loads the kernel modules. A module that is built in or already loaded is no error.
func loadModules() {
	list, err := os.ReadFile(moduleList)
	report("modules", err)
	for _, path := range parseModules(string(list)) {
		if err := loadModule(path); !errors.Is(err, unix.EEXIST) {
			report("module "+path, err)
		}
	}
}

func parseModules(list string) (paths []string) {
	for line := range strings.Lines(list) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			paths = append(paths, line)
		}
	}
	return paths
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.FinitModule(int(f.Fd()), "", 0)
}

// wantControllers are the cgroup controllers that containers are limited and measured by.
var wantControllers = []string{"cpu", "cpuset", "hugetlb", "io", "memory", "pids"}

// enableControllers enables the kernel's controllers for the children of the root cgroup. Processes may stay in the root:
// only other cgroups cannot have both processes and controlled children.
func enableControllers(root string) error {
	have, err := os.ReadFile(root + "/cgroup.controllers")
	if err != nil {
		return err
	}
	return os.WriteFile(root+"/cgroup.subtree_control", []byte(controllers(string(have))), 0)
}

// controllers returns what to write to cgroup.subtree_control if the kernel has the given controllers.
func controllers(have string) string {
	var enable []string
	for _, c := range strings.Fields(have) {
		if slices.Contains(wantControllers, c) {
			enable = append(enable, "+"+c)
		}
	}
	return strings.Join(enable, " ")
}

// loopbackUp brings up the interface lo, to which the kernel then gives its addresses.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCSIFFLAGS, uintptr(unsafe.Pointer(ifr))); errno != 0 {
		return errno
	}
	return nil
}
