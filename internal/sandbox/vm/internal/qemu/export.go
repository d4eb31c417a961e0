package qemu

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
)

// What follows is for the driver libvirt, whose QEMU is given the same files in the same way.

// Validate refuses, as errdefs.ErrInvalidArgument, a definition that QEMU could misunderstand or does not know.
func Validate(d machine.Definition) error { return validate(d) }

// IsMachine tells whether a process is the QEMU of the machine of that name.
func IsMachine(pid int, name string) bool {
	cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && marked(cmdline, name)
}

// OpenDisk opens a disk image or a block device, and tells which it is.
func OpenDisk(path string, readOnly bool) (file *os.File, device bool, err error) {
	flags := os.O_RDWR
	if readOnly {
		flags = os.O_RDONLY
	}
	if file, err = openDisk(path, flags); err != nil {
		return nil, false, err
	}
	info, err := file.Stat()
	if err != nil {
		file.Close()
		return nil, false, err
	}
	return file, isBlock(info), nil
}

// OpenBoot opens a kernel or initrd so that any user can open it again by /proc/self/fd.
func OpenBoot(path string) (*os.File, error) { return openBoot(path) }

// OpenShare opens a directory for virtio-9p, with root's files seen as those of QEMU's user where the file system can.
func OpenShare(path string, readOnly bool, uid, gid int) (*os.File, error) {
	tree, _, err := virtiofsd.Open(path, readOnly, uid, gid)
	return tree, err
}

// OpenOwned makes a directory that belongs to QEMU's user, for the socket of VNC.
func OpenOwned(path string, uid, gid int) (*os.File, error) { return openOwned(path, uid, gid) }

// OpenSerialLog opens the file to which the serial console is appended.
func OpenSerialLog(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
}
