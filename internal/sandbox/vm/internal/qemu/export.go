package qemu

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/virtiofsd"
)

// These functions are shared with the driver libvirt, whose QEMU inherits the same files.

// IsMachine reports whether the process is the QEMU of the named machine.
func IsMachine(pid int, name string) bool {
	cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && isCommandOf(cmdline, name)
}

// OpenDisk opens a disk image or a block device, and reports which of the two it is.
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

// OpenShare opens a directory for virtio-9p. Where the file system supports it, QEMU's user sees root's files as its
// own.
func OpenShare(path string, readOnly bool, uid, gid int) (*os.File, error) {
	tree, _, err := virtiofsd.Open(path, readOnly, uid, gid)
	return tree, err
}

// OpenSerialLog opens the serial console's log for appending.
func OpenSerialLog(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
}
