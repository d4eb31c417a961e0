package stats

import (
	"errors"
	"fmt"
	"sync"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// The files are read with bare system calls: os.File would add a poll registration, a finalizer and three
// allocations to each of some twenty files, of every container, every few seconds.

// buffer is where a file is read to; its content lives until the next read.
type buffer struct{ bytes []byte }

var buffers = sync.Pool{New: func() any { return &buffer{bytes: make([]byte, 8<<10)} }}

func borrow() *buffer { return buffers.Get().(*buffer) }

func (b *buffer) giveBack() { buffers.Put(b) }

// dir is the open directory of a cgroup in one hierarchy. Its first failure sticks and is asked for at the end, so
// that reading reads like a list. A file that is not there is no failure: kernels and configurations differ.
type dir struct {
	fd   int
	full string // the directory's path in the file system
	path string // the cgroup's path
	buf  *buffer
	err  error
}

// errNotMounted is the failure of dir when the whole hierarchy of a controller is missing.
var errNotMounted = errors.New("controller is not mounted")

// dir opens the cgroup's directory in the hierarchy of a controller ("" on v2).
func (c Cgroup) dir(controller string, buf *buffer) (*dir, error) {
	hierarchy := c.root.Mount
	if controller != "" {
		hierarchy += "/" + controller
	}
	full := hierarchy + c.path
	fd, err := open(unix.AT_FDCWD, full, unix.O_PATH|unix.O_DIRECTORY)
	switch {
	case err == nil:
		return &dir{fd: fd, full: full, path: c.path, buf: buf}, nil
	case err != unix.ENOENT:
		return nil, fmt.Errorf("open cgroup %s: %w", full, err)
	case unix.Access(hierarchy, unix.F_OK) != nil:
		return nil, fmt.Errorf("%s: %w: %w", hierarchy, errNotMounted, errdefs.ErrUnavailable)
	}
	return nil, gone(c.path)
}

func gone(path string) error { return fmt.Errorf("cgroup %s: %w", path, errdefs.ErrNotFound) }

func (d *dir) close() { unix.Close(d.fd) }

// failure is the first thing that went wrong since the directory was opened.
func (d *dir) failure() error { return d.err }

// file is the content of a file of the directory, valid until the next call; nil when there is none or after a failure.
func (d *dir) file(name string) []byte {
	if d.err != nil {
		return nil
	}
	content, err := readAt(d.fd, name, d.buf)
	switch err {
	case nil:
		return content
	case unix.ENOENT, unix.EOPNOTSUPP: // EOPNOTSUPP: pressure accounting is off
		// A removed directory has no files either; only a missing file in a living one is fine.
		if d.alive() {
			return nil
		}
		d.err = gone(d.path)
	case unix.ENODEV: // removed between open and read
		d.err = gone(d.path)
	default:
		d.err = fmt.Errorf("read %s of cgroup %s: %w", name, d.path, err)
	}
	return nil
}

// alive asks by path: the link count of a removed directory does not fall to 0 in the cgroup file system.
func (d *dir) alive() bool { return unix.Access(d.full, unix.F_OK) == nil }

// number is the one number in a file: 0 when the file is missing, Unlimited for "max".
func (d *dir) number(name string) uint64 {
	v, _ := d.lookup(name)
	return v
}

// limit is like number, but a missing file is Unlimited.
func (d *dir) limit(name string) uint64 {
	if v, ok := d.lookup(name); ok {
		return v
	}
	return Unlimited
}

// lookup is like number and tells whether the file is there.
func (d *dir) lookup(name string) (uint64, bool) {
	content := d.file(name)
	if content == nil {
		return 0, false
	}
	v, ok := parseNumber(content)
	if !ok {
		d.err = fmt.Errorf("%s of cgroup %s is not a number: %.40q", name, d.path, content)
	}
	return v, ok
}

// pairs calls f for each "key number" line of a file.
func (d *dir) pairs(name string, f func(key string, v uint64)) { parsePairs(d.file(name), f) }

func open(at int, name string, flags int) (int, error) {
	for {
		fd, err := unix.Openat(at, name, flags|unix.O_CLOEXEC, 0)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

// readAt reads a whole file into buf, which grows if need be and keeps its size for the next one.
func readAt(at int, name string, buf *buffer) ([]byte, error) {
	fd, err := open(at, name, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	n := 0
	for {
		if n == len(buf.bytes) {
			buf.bytes = append(buf.bytes, make([]byte, len(buf.bytes))...)
		}
		m, err := unix.Read(fd, buf.bytes[n:])
		switch {
		case err == unix.EINTR:
		case err != nil:
			return nil, err
		case m == 0:
			return buf.bytes[:n:n], nil
		default:
			n += m
		}
	}
}
