package console

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
)

var (
	fpAppend = failpoint.New("console.relay.append")
	fpVouch  = failpoint.New("console.relay.vouch")
	fpResume = failpoint.New("console.relay.resume")
)

// open opens the files and finds out where to continue.
func (r *relay) open() (err error) {
	if r.serial, err = openOwn(r.cfg.SerialLog); err != nil {
		return err
	}
	if r.state, err = openOwn(r.cfg.StateFile); err != nil {
		return err
	}
	err = r.begin()
	if err == nil {
		return nil
	}
	if _, was, readErr := readRecord(r.state); readErr != nil || !was {
		return err
	}
	// The machine may be running already, and must not fail for its log.
	r.log.Warn("the log of a console cannot be opened; will try again", "serial log", r.cfg.SerialLog, "err", err)
	r.late = true
	return nil
}

// begin opens the container's log and resumes.
func (r *relay) begin() error {
	file, err := r.cfg.OpenLog()
	if err != nil {
		return err
	}
	if err := r.resume(file); err != nil {
		if file != nil {
			file.Close()
		}
		return err
	}
	r.late = false
	return nil
}

// openOwn opens or makes a file, and refuses anything that another user may have put in its place.
func openOwn(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file: %w", path, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// resume continues where the record says. Entries that are not committed are truncated if their source is still there.
func (r *relay) resume(file *os.File) error {
	serial, size, err := identify(r.serial)
	if err != nil {
		return err
	}
	was, ok, err := readRecord(r.state)
	if err != nil {
		return err
	}
	r.at = record{serial: serial}
	if ok && was.serial == serial && was.offset <= size {
		r.at.offset = was.offset
	}
	start, err := firstData(r.serial, r.at.offset, size)
	if err != nil {
		return err
	}
	if ok && r.at.offset == was.offset && start == was.offset && was.log != (fileID{}) {
		if err := cutOff(file, was); err != nil {
			return err
		}
	}
	r.at.offset = start
	if err := fpResume.Hit(context.Background()); err != nil {
		return err
	}
	return r.use(file)
}

// use makes file the container's log and commits its present content.
func (r *relay) use(file *os.File) error {
	next := r.at
	next.log, next.logSize = fileID{}, 0
	if file != nil {
		var err error
		if next.log, next.logSize, err = identify(file); err != nil {
			return err
		}
	}
	if err := writeRecord(r.state, next); err != nil {
		return err
	}
	r.at, r.file = next, file
	return nil
}

// firstData returns the offset of the first data at or after offset, past any hole. Only a power loss leaves the record behind
// what was punched out.
func firstData(f *os.File, offset, size int64) (int64, error) {
	if offset >= size {
		return offset, nil
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	start := offset
	if controlErr := raw.Control(func(fd uintptr) { start, err = unix.Seek(int(fd), offset, unix.SEEK_DATA) }); controlErr != nil {
		return 0, controlErr
	}
	switch {
	case errors.Is(err, unix.ENXIO):
		return size, nil
	case errors.Is(err, unix.EINVAL): // a file system without holes
		return offset, nil
	case err != nil:
		return 0, os.NewSyscallError("lseek", err)
	}
	return start, nil
}

// cutOff truncates a log to what is committed: file, or the rotated one beside it.
func cutOff(file *os.File, was record) error {
	if file == nil {
		return nil
	}
	id, size, err := identify(file)
	if err != nil {
		return err
	}
	if id == was.log {
		if size > was.logSize {
			return file.Truncate(was.logSize)
		}
		return nil
	}
	entries, err := os.ReadDir(filepath.Dir(file.Name()))
	if err != nil {
		return err
	}
	for _, e := range entries {
		var st unix.Stat_t
		path := filepath.Join(filepath.Dir(file.Name()), e.Name())
		if !e.Type().IsRegular() || unix.Lstat(path, &st) != nil || (fileID{uint64(st.Dev), st.Ino}) != was.log {
			continue
		}
		return cutRotated(path, was)
	}
	return nil // it was compressed or removed
}

func cutRotated(path string, was record) error {
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	id, size, err := identify(f)
	if err != nil || id != was.log || size <= was.logSize {
		return err
	}
	return f.Truncate(was.logSize)
}
