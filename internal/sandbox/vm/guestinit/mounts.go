package guestinit

import (
	"os"

	"golang.org/x/sys/unix"
)

type mount struct {
	target, fstype string
	flags          uintptr
	data           string
}

const cgroupRoot = "/sys/fs/cgroup"

const restricted = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// mounts are in mounting order. /tmp and /run can hold programs, as on Debian.
var mounts = []mount{
	{"/proc", "proc", restricted, ""},
	{"/sys", "sysfs", restricted, ""},
	{cgroupRoot, "cgroup2", restricted, "nsdelegate,memory_recursiveprot"},
	{"/dev", "devtmpfs", unix.MS_NOSUID, "mode=0755"},
	{"/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666"},
	{"/dev/shm", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
	{"/dev/mqueue", "mqueue", restricted, ""},
	{"/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=0755"},
	{"/tmp", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV, "mode=1777"},
}

// links are what programs expect in /dev besides the kernel's devices.
var links = []struct{ name, target string }{
	{"/dev/fd", "/proc/self/fd"},
	{"/dev/stdin", "/proc/self/fd/0"},
	{"/dev/stdout", "/proc/self/fd/1"},
	{"/dev/stderr", "/proc/self/fd/2"},
}

func (m mount) mount() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return err
	}
	return unix.Mount(m.fstype, m.target, m.fstype, m.flags, m.data)
}
