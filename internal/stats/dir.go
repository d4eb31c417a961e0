package stats

import (
	"bytes"
	"errors"
	"fmt"
	"sync"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// The files are read without os.File, which would add a poll registration, a finalizer and three allocations for each
// of a dozen files, for every container, every few seconds (docs/adr/0038-*.md has the measurement).

// buffer holds the content of a file until the next file is read.
type buffer struct{ bytes []byte }

var buffers = sync.Pool{New: func() any { return &buffer{bytes: make([]byte, 8<<10)} }}

// dir is the open directory of a cgroup in one hierarchy. After the first error, which is kept in err, it reads nothing
// more. So callers need to check err only at the end. A missing file is not an error, because kernels and
// configurations differ.
type dir struct {
	fd   int
	full string // the directory's path in the file system
	path string // the cgroup's path
	buf  *buffer
	err  error
	// memo holds the content of files that pairs has read, so that it reads each only once. It is nil if each file is read
	// only once anyway.
	memo map[string][]byte
}

// errNotMounted means that the hierarchy of a controller is missing.
var errNotMounted = errors.New("controller is not mounted")

// open opens the cgroup's directory in the hierarchy of a controller. On v2, the controller is "".
func (r Root) open(controller, name string, buf *buffer) (*dir, error) {
	hierarchy := r.Mount
	if controller != "" {
		hierarchy += "/" + controller
	}
	full := hierarchy + name
	fd, err := openat(unix.AT_FDCWD, full, unix.O_PATH|unix.O_DIRECTORY)
	switch {
	case err == nil:
		return &dir{fd: fd, full: full, path: name, buf: buf}, nil
	case err != unix.ENOENT:
		return nil, fmt.Errorf("open cgroup %s: %w", full, err)
	case unix.Access(hierarchy, unix.F_OK) != nil:
		return nil, fmt.Errorf("%s: %w: %w", hierarchy, errNotMounted, errdefs.ErrUnavailable)
	}
	return nil, notFound(name)
}

func notFound(path string) error { return fmt.Errorf("cgroup %s: %w", path, errdefs.ErrNotFound) }

func (d *dir) close() { unix.Close(d.fd) }

// file returns the content of a file. The content is valid until the next call. If the file is missing, or after an
// error, file returns nil.
func (d *dir) file(name string) []byte {
	if d.err != nil {
		return nil
	}
	content, err := readAt(d.fd, name, d.buf)
	switch err {
	case nil:
		return content
	case unix.ENOENT, unix.EOPNOTSUPP: // EOPNOTSUPP: pressure accounting is off
		// If the whole directory was removed, its files are missing too.
		if d.alive() {
			return nil
		}
		d.err = notFound(d.path)
	case unix.ENODEV: // removed between open and read
		d.err = notFound(d.path)
	default:
		d.err = fmt.Errorf("read %s of cgroup %s: %w", name, d.path, err)
	}
	return nil
}

// alive reports whether the directory still exists. It checks the path, because in the cgroup file system the link
// count of a removed directory stays above 0.
func (d *dir) alive() bool { return unix.Access(d.full, unix.F_OK) == nil }

// number returns the number in a file. It returns 0 if the file is missing, and Unlimited for "max".
func (d *dir) number(name string) uint64 {
	v, _ := d.lookup(name)
	return v
}

// limit is like number, but returns Unlimited if the file is missing.
func (d *dir) limit(name string) uint64 {
	if v, ok := d.lookup(name); ok {
		return v
	}
	return Unlimited
}

// lookup is like number, and also reports whether the file exists.
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
func (d *dir) pairs(name string, f func(key string, v uint64)) {
	content, read := d.memo[name]
	if !read {
		content = d.file(name)
		if d.memo != nil {
			content = bytes.Clone(content)
			d.memo[name] = content
		}
	}
	parsePairs(content, f)
}

func openat(at int, name string, flags int) (int, error) {
	for {
		fd, err := unix.Openat(at, name, flags|unix.O_CLOEXEC, 0)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

// readAt reads a whole file into buf, which grows as needed.
func readAt(at int, name string, buf *buffer) ([]byte, error) {
	fd, err := openat(at, name, unix.O_RDONLY)
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
