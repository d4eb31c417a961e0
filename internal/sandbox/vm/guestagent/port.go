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
	// portLook is how often it is looked for a port that is not there: its driver may be loaded yet.
	portLook = 250 * time.Millisecond
	// flapTime is how soon after a host another one's leaving makes us pause.
	flapTime = 50 * time.Millisecond
)

// Port is a virtio-serial port. Reads and writes block a thread each: a port that blocks is the only way to be told when a host
// comes, for Linux lets a write wait for it, while a read gives the end at once.
type Port struct {
	fd   int
	left time.Time
}

// FindPort looks for the port of that name, with or without udev: "" when there is none.
func FindPort(name string) string { return findPort(name, "/dev", "/sys/class/virtio-ports") }

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

// WaitPort waits for the port of that name and opens it.
func WaitPort(name string) (*Port, error) {
	for {
		if path := FindPort(name); path != "" {
			fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
			if err == nil {
				return &Port{fd: fd}, nil
			}
			if err != unix.ENOENT && err != unix.ENXIO && err != unix.ENODEV {
				return nil, &os.PathError{Op: "open", Path: path, Err: err}
			}
		}
		time.Sleep(portLook) // neither devtmpfs nor sysfs tells by inotify
	}
}

// Close closes the port.
func (p *Port) Close() error { return unix.Close(p.fd) }

// Read implements io.Reader; io.EOF says that no host is there.
func (p *Port) Read(b []byte) (int, error) {
	for {
		n, err := unix.Read(p.fd, b)
		switch {
		case err == unix.EINTR || err == unix.EAGAIN:
			continue
		case err != nil:
			return 0, os.NewSyscallError("read", err)
		case n == 0:
			if !p.left.IsZero() && time.Since(p.left) < flapTime {
				time.Sleep(flapTime) // should a write not have waited
			}
			p.left = time.Now()
			return 0, io.EOF
		}
		return n, nil
	}
}

// Write implements io.Writer. It waits while no host is there.
func (p *Port) Write(b []byte) (int, error) {
	written := 0
	for written < len(b) {
		n, err := unix.Write(p.fd, b[written:])
		switch {
		case err == unix.EINTR || err == unix.EAGAIN:
			continue
		case err != nil:
			return written, os.NewSyscallError("write", err)
		case n <= 0:
			return written, errors.New("the port takes nothing")
		}
		written += n
	}
	return written, nil
}
