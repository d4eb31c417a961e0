package linux

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/sandbox"
)

// openTerminal makes a pseudo-terminal: our end, which can be read with a deadline and closed while it is read, and the
// other one.
func openTerminal() (ours, theirs *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make a terminal: %w", err)
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		unix.Close(fd)
		return nil, nil, fmt.Errorf("unlock the terminal: %w", err)
	}
	// The peer is opened through our end: a path below /dev/pts may be of another mount.
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno != 0 {
		unix.Close(fd)
		return nil, nil, fmt.Errorf("open the terminal's other end: %w", errno)
	}
	return os.NewFile(uintptr(fd), "ptmx"), os.NewFile(peer, "pts"), nil
}

// setSize tells a terminal how large it is; those in it get SIGWINCH.
func setSize(terminal *os.File, size sandbox.TermSize) error {
	conn, err := terminal.SyscallConn()
	if err != nil {
		return err
	}
	var setErr error
	err = conn.Control(func(fd uintptr) {
		setErr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: size.Height, Col: size.Width})
	})
	if err != nil {
		return err
	}
	return setErr
}

// followSize gives the terminal every size that comes, until it is told to stop.
func followSize(terminal *os.File, sizes <-chan sandbox.TermSize, stop <-chan struct{}) {
	for {
		select {
		case size, ok := <-sizes:
			if !ok {
				return
			}
			_ = setSize(terminal, size)
		case <-stop:
			return
		}
	}
}
