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

// open opens the files and resumes copying. If only the container's log cannot be opened, and this is not the machine's
// first console, open sets logPending instead of returning the error: a running machine must not fail because of its
// log. The machine's first console is recognized by the missing record in the state file.
func (r *relay) open() (err error) {
	if r.serial, err = openOwn(r.cfg.SerialLog); err != nil {
		return err
	}
	if r.state, err = openOwn(r.cfg.StateFile); err != nil {
		return err
	}
	err = r.openLog()
	if err == nil {
		return nil
	}
	if _, exists, readErr := readRecord(r.state); readErr != nil || !exists {
		return err
	}
	r.log.Warn("cannot open a console's log; will retry", "path", r.cfg.SerialLog, "err", err)
	r.logPending = true
	return nil
}

// openLog opens the container's log and resumes copying.
func (r *relay) openLog() error {
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
	r.logPending = false
	return nil
}

// openOwn opens or makes a regular file. It refuses links and special files, which another user may have put there.
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

// resume continues at the offset in the state file. It truncates uncommitted entries if it can write them again.
func (r *relay) resume(file *os.File) error {
	serial, size, err := identify(r.serial)
	if err != nil {
		return err
	}
	saved, ok, err := readRecord(r.state)
	if err != nil {
		return err
	}
	r.committed = record{serial: serial}
	if ok && saved.serial == serial && saved.offset <= size {
		r.committed.offset = saved.offset
	}
	start, err := firstData(r.serial, r.committed.offset, size)
	if err != nil {
		return err
	}
	if ok && r.committed.offset == saved.offset && start == saved.offset && saved.log != (fileID{}) {
		if err := truncateUncommitted(file, saved); err != nil {
			return err
		}
	}
	r.committed.offset = start
	if err := fpResume.Hit(context.Background()); err != nil {
		return err
	}
	return r.setLog(file)
}

// setLog makes the given file the container's log and commits the file's current content.
func (r *relay) setLog(file *os.File) error {
	next := r.committed
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
	r.committed, r.file = next, file
	return nil
}

// firstData returns the offset of the first data at or after the given offset. After a power failure, the record may be
// older than the last hole punched by the relay. The given offset may then be in that hole.
func firstData(f *os.File, offset, size int64) (int64, error) {
	if offset >= size {
		return offset, nil
	}
	var start int64
	err := withFD(f, func(fd int) (err error) {
		start, err = unix.Seek(fd, offset, unix.SEEK_DATA)
		return err
	})
	switch {
	case errors.Is(err, unix.ENXIO):
		return size, nil
	case errors.Is(err, unix.EINVAL): // the file system does not support holes
		return offset, nil
	case err != nil:
		return 0, os.NewSyscallError("lseek", err)
	}
	return start, nil
}

// truncateUncommitted truncates a log to the committed size in the given record. The record also identifies the log: it
// is the given file or, after a rotation, another file in the same directory.
func truncateUncommitted(file *os.File, saved record) error {
	if file == nil {
		return nil
	}
	id, size, err := identify(file)
	if err != nil {
		return err
	}
	if id == saved.log {
		if size > saved.logSize {
			return file.Truncate(saved.logSize)
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
		if !e.Type().IsRegular() || unix.Lstat(path, &st) != nil || (fileID{uint64(st.Dev), st.Ino}) != saved.log {
			continue
		}
		return truncateRotated(path, saved)
	}
	return nil // the rotated log was compressed or removed
}

func truncateRotated(path string, saved record) error {
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	id, size, err := identify(f)
	if err != nil || id != saved.log || size <= saved.logSize {
		return err
	}
	return f.Truncate(saved.logSize)
}
