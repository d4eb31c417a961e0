package guestagent

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// openTerminal makes a pseudo-terminal. If the guest has no devpts, openTerminal mounts one at /dev/pts.
func openTerminal(columns, rows uint16) (master, slave *os.File, err error) {
	master, err = os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if os.IsNotExist(err) || err == nil && !mounted(master) {
		if err == nil {
			_ = master.Close()
		}
		if err := mountPTS(); err != nil {
			return nil, nil, err
		}
		master, err = os.OpenFile("/dev/pts/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		return nil, nil, err
	}
	name, err := slaveName(master)
	if err == nil {
		slave, err = os.OpenFile(name, os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		_ = master.Close()
		return nil, nil, err
	}
	if columns > 0 && rows > 0 {
		setSize(master, columns, rows)
	}
	return master, slave, nil
}

// slaveName unlocks the slave end of a pseudo-terminal and returns that end's name.
func slaveName(master *os.File) (string, error) {
	var number int
	err := withFD(master, func(fd int) (err error) {
		if err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err == nil {
			number, err = unix.IoctlGetInt(fd, unix.TIOCGPTN)
		}
		return err
	})
	if err != nil {
		return "", os.NewSyscallError("ioctl", err)
	}
	return "/dev/pts/" + strconv.Itoa(number), nil
}

// withFD calls the given function with the file's descriptor.
func withFD(f *os.File, call func(fd int) error) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var callErr error
	if err := raw.Control(func(fd uintptr) { callErr = call(int(fd)) }); err != nil {
		return err
	}
	return callErr
}

// mounted reports whether the slave end of a pseudo-terminal exists in /dev/pts.
func mounted(master *os.File) bool {
	name, err := slaveName(master)
	if err != nil {
		return false
	}
	_, err = os.Stat(name)
	return err == nil
}

func mountPTS() error {
	if err := os.MkdirAll("/dev/pts", 0o755); err != nil {
		return err
	}
	return os.NewSyscallError("mount devpts",
		unix.Mount("devpts", "/dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "mode=0620,ptmxmode=0666,gid=5"))
}
