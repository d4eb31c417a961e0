package guestagent

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// portPoll is the interval between searches for a missing port. The port's driver may be loaded after the agent has
	// started.
	portPoll = 250 * time.Millisecond
	// lateMax is how many searches after the first port has appeared the other ports can be missing.
	lateMax = 20
	// If two reads within flapTime find that no host is connected, the second read pauses for flapTime.
	flapTime = 50 * time.Millisecond
)

// port is a virtio-serial port in blocking mode. In this mode, each read or write blocks a thread. A read without
// a host returns 0 bytes immediately, but a write waits until a host connects, and so shows when that happens.
type port struct {
	fd   int
	left time.Time
}

// findPort returns the path of the named port, or "" if the port is missing. It does not need udev.
func findPort(name, dev, sys string) string {
	if path := filepath.Join(dev, "virtio-ports", name); exists(path) {
		return path
	}
	ports, _ := filepath.Glob(filepath.Join(sys, "*", "name"))
	for _, file := range ports {
		if got, err := readSome(file, 4096); err == nil && strings.TrimSpace(got) == name {
			if path := filepath.Join(dev, filepath.Base(filepath.Dir(file))); exists(path) {
				return path
			}
		}
	}
	return ""
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func portPath(name string) string { return findPort(name, "/dev", "/sys/class/virtio-ports") }

// waitPort waits for the named port and opens it.
func waitPort(name string) (*port, error) {
	for {
		if path := portPath(name); path != "" {
			fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
			if err == nil {
				return &port{fd: fd}, nil
			}
			if err != unix.ENOENT && err != unix.ENXIO && err != unix.ENODEV {
				return nil, &os.PathError{Op: "open", Path: path, Err: err}
			}
		}
		time.Sleep(portPoll) // pacing: devtmpfs and sysfs have no inotify events
	}
}

// Close closes the port.
func (p *port) Close() error { return unix.Close(p.fd) }

// Read implements io.Reader. io.EOF means that no host is connected.
func (p *port) Read(b []byte) (int, error) {
	for {
		n, err := unix.Read(p.fd, b)
		switch {
		case err == unix.EINTR || err == unix.EAGAIN:
			continue
		case err != nil:
			return 0, os.NewSyscallError("read", err)
		case n == 0:
			if !p.left.IsZero() && time.Since(p.left) < flapTime {
				time.Sleep(flapTime) // pacing: in case the write in between did not wait for a host
			}
			p.left = time.Now()
			return 0, io.EOF
		}
		return n, nil
	}
}

// Write implements io.Writer. It waits until a host is connected.
func (p *port) Write(b []byte) (int, error) {
	written := 0
	for written < len(b) {
		n, err := unix.Write(p.fd, b[written:])
		switch {
		case err == unix.EINTR || err == unix.EAGAIN:
			continue
		case err != nil:
			return written, os.NewSyscallError("write", err)
		case n <= 0:
			return written, errors.New("the port accepts no data")
		}
		written += n
	}
	return written, nil
}
