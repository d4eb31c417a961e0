package guestinit

import (
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// RootDisk is the serial number of the disk with the guest's programs, libraries and kernel modules. hack/images makes it.
const RootDisk = "guest0"

// enterRoot makes the root of the disk RootDisk and a tmpfs, and frees the initramfs, which has only this program and the
// modules for the disk:
//
//	disk (EROFS, read-only) ── lower ─┐
//	tmpfs, empty at first ──── upper ─┴─ overlay ──▶ /
//
// So every path can be written and costs memory only then. The kernel can drop the disk's pages. The overlay is a mount point,
// unlike the initramfs: pivot_root(2), which OCI runtimes call, refuses to leave an initramfs. Without the disk, the root stays
// the initramfs, and there is no program to start.
func enterRoot() error {
	loadModules()
	const root = "/newroot"
	if err := mountRoot(root); err != nil {
		return err
	}
	for _, name := range []string{"/init", "/etc", "/lib"} { // the kernel keeps what this process maps of /init
		report("free the initramfs", os.RemoveAll(name))
	}
	if err := unix.Chdir(root); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return err
	}
	return unix.Chroot(".")
}

// mountRoot mounts the overlay at the directory root, and nothing else.
func mountRoot(root string) error {
	const lower, upper = "/lower", "/upper"
	for _, m := range []mount{{"/sys", "sysfs", restricted, ""}, {"/dev", "devtmpfs", unix.MS_NOSUID, ""}, {upper, "tmpfs", 0, "mode=0755"}} {
		if err := m.mount(); err != nil {
			return err
		}
		defer func() { _ = unix.Unmount(m.target, unix.MNT_DETACH) }() // the overlay keeps what it needs
	}
	device, err := FindDisk(RootDisk)
	if err != nil {
		return err
	}
	if err := errors.Join(os.Mkdir(lower, 0o755), os.Mkdir(root, 0o755), os.Mkdir(upper+"/files", 0o755),
		os.Mkdir(upper+"/work", 0o755)); err != nil {
		return err
	}
	if err := unix.Mount(device, lower, "erofs", unix.MS_RDONLY, ""); err != nil {
		return os.NewSyscallError("mount the root disk", err)
	}
	defer func() { _ = unix.Unmount(lower, unix.MNT_DETACH) }()
	err = unix.Mount("overlay", root, "overlay", 0, "lowerdir="+lower+",upperdir="+upper+"/files,workdir="+upper+"/work")
	return os.NewSyscallError("mount the root", err)
}

// FindDisk returns the device of the disk with a serial number.
func FindDisk(serial string) (string, error) { return findDisk("/sys/block", serial) }

// findDisk is FindDisk with the directory that is /sys/block.
func findDisk(dir, serial string) (string, error) {
	disks, err := os.ReadDir(dir)
	if err != nil {
		return "", err
	}
	for _, d := range disks {
		got, err := os.ReadFile(dir + "/" + d.Name() + "/serial")
		if err == nil && strings.TrimSpace(string(got)) == serial {
			return "/dev/" + d.Name(), nil
		}
	}
	return "", errors.New("the machine has no disk with the serial number " + serial)
}
