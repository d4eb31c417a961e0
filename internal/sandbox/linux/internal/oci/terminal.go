package oci

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/fdpass"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// consoleTime limits how long a started runtime can take to pass the terminal.
const consoleTime = time.Minute

// console is a socket over which an OCI runtime passes us a terminal.
type console struct {
	*net.UnixListener
	dir int
	// Path is the runtime's path to the socket. It goes through our descriptor of the directory, because the directory's
	// own path may exceed the 107 bytes of a socket address.
	path string
}

func listenConsole(dir string) (*console, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	path := fmt.Sprintf("/proc/%d/fd/%d/tty", os.Getpid(), fd)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("console socket in %s: %w", filepath.Base(dir), err)
	}
	l.SetUnlinkOnClose(false) // the socket is removed with its directory
	return &console{l, fd, path}, nil
}

func (c *console) Close() error { return errors.Join(c.UnixListener.Close(), unix.Close(c.dir)) }

// receive waits for the terminal. If the returned file is closed, a read that is under way ends.
func (c *console) receive() (*os.File, error) {
	limit := time.Now().Add(consoleTime)
	if err := c.SetDeadline(limit); err != nil {
		return nil, err
	}
	conn, err := c.AcceptUnix()
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(limit); err != nil {
		return nil, err
	}
	stream := fdpass.NewStream(conn)
	defer stream.Close()
	if _, err := stream.Read(make([]byte, 4096)); err != nil { // the terminal's name, which comes with the descriptor
		return nil, fmt.Errorf("the OCI runtime passed no terminal: %w", err)
	}
	return stream.TakeOne("terminal")
}

// setSize sets the size of a terminal. The terminal's processes get SIGWINCH.
func setSize(terminal *os.File, size sandbox.TermSize) error {
	conn, err := terminal.SyscallConn()
	if err != nil {
		return err
	}
	var setErr error
	err = conn.Control(func(fd uintptr) {
		setErr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: size.Height, Col: size.Width})
	})
	return errors.Join(err, setErr)
}

// FollowSize calls apply with each size that it receives, until either channel is closed.
func FollowSize(sizes <-chan sandbox.TermSize, stop <-chan struct{}, apply func(sandbox.TermSize)) {
	for {
		select {
		case size, ok := <-sizes:
			if !ok {
				return
			}
			apply(size)
		case <-stop:
			return
		}
	}
}
