package boltfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"
	bbolterrors "go.etcd.io/bbolt/errors"
)

// LockTimeout limits the wait while another process has the file open.
const LockTimeout = 2 * time.Second

// Options configures Open.
type Options struct {
	// Fill writes the initial content of a new file. If Fill is nil, the file has no content.
	Fill func(*bbolt.Tx) error
	// Recognize returns an error, of any class, for an existing file that is not the caller's. If Recognize is nil, any
	// file is accepted.
	Recognize func(*bbolt.Tx) error
	// Shallow skips the check of all pages, for callers that call Check themselves.
	Shallow bool
	// ReadOnly opens an existing file for reading.
	ReadOnly bool
	// MaxSize bounds the file, in bytes: a transaction that needs more fails. 0 means no bound.
	MaxSize int
}

// Open opens the file at path. If the file is missing, Open creates it, and the result fresh is true. Open returns
// errdefs.ErrDataLoss for a file that is damaged or not the caller's, and leaves the file unchanged. If another process
// has the file open, it returns errdefs.ErrUnavailable.
func Open(path string, o Options) (db *bbolt.DB, fresh bool, err error) {
	_, err = os.Lstat(path)
	fresh = errors.Is(err, os.ErrNotExist) && !o.ReadOnly
	switch {
	case fresh:
		err = create(path, o.Fill)
	case err == nil:
		err = verify(path, o)
	}
	if err != nil {
		return nil, fresh, err
	}
	db, err = open(path, o.ReadOnly, o.MaxSize)
	return db, fresh, err
}

func open(path string, readOnly bool, maxSize int) (db *bbolt.DB, err error) {
	var file *os.File
	defer func() {
		if errdefs.IsDataLoss(err) && file != nil {
			// After a panic, bbolt leaves the file open, locked and mapped. The mapping would keep the lock.
			_ = syscall.Flock(int(file.Fd()), syscall.LOCK_UN)
			_ = file.Close()
		}
	}()
	defer recoverDamage(path, &err)
	db, err = bbolt.Open(path, 0o600, &bbolt.Options{
		OpenFile: func(name string, flag int, mode os.FileMode) (_ *os.File, err error) {
			file, err = os.OpenFile(name, flag, mode)
			return file, err
		},
		Timeout: LockTimeout, FreelistType: bbolt.FreelistMapType, ReadOnly: readOnly, NoStatistics: true, MaxSize: maxSize,
	})
	if errors.Is(err, bbolterrors.ErrTimeout) {
		return nil, fmt.Errorf("%s is open in another process: %w", path, errdefs.ErrUnavailable)
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	return db, nil
}

// recoverDamage turns a panic into an error, because bbolt panics on damaged pages.
func recoverDamage(path string, err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("%s is damaged: %v: %w", path, p, errdefs.ErrDataLoss)
	}
}

// create creates a file. The file is complete or absent, even if the process ends or the power fails in the middle.
func create(path string, fill func(*bbolt.Tx) error) error {
	draft := path + ".new"
	if err := os.Remove(draft); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	db, err := open(draft, false, 0)
	if err != nil {
		return err
	}
	if fill != nil {
		err = db.Update(fill)
	}
	if err := errors.Join(err, db.Close()); err != nil {
		return err
	}
	if err := os.Rename(draft, path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// syncDir makes a new directory entry survive a power failure.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// verify checks a file without changing it. It checks the file's size before it reads pages, because a read past the
// end of the file would kill the process (SIGBUS).
func verify(path string, o Options) (err error) {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.Size() == 0 {
		return fmt.Errorf("%s is empty: %w", path, errdefs.ErrDataLoss)
	}
	db, err := open(path, true, 0)
	if err != nil {
		if isContentError(err) {
			err = fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
		}
		return err
	}
	defer db.Close()
	defer recoverDamage(path, &err)
	return db.View(func(tx *bbolt.Tx) error {
		if tx.Size() > info.Size() {
			return fmt.Errorf("%s is truncated: it has %d of %d bytes: %w", path, info.Size(), tx.Size(), errdefs.ErrDataLoss)
		}
		if !o.Shallow {
			if err := Check(tx); err != nil {
				return fmt.Errorf("%s is damaged: %w: %w", path, err, errdefs.ErrDataLoss)
			}
		}
		if o.Recognize == nil {
			return nil
		}
		if err := o.Recognize(tx); err != nil {
			return fmt.Errorf("%s %w: %w", path, err, errdefs.ErrDataLoss)
		}
		return nil
	})
}

// isContentError reports whether an error from open is about the file's content. Other errors from open have an errno.
func isContentError(err error) bool {
	_, errno := errors.AsType[syscall.Errno](err)
	return !errno && !errdefs.IsUnavailable(err)
}

// maxReported limits the number of errors that Check returns, because one bad page leads to an error for each page
// below it.
const maxReported = 3

// Check reads all pages and returns an error that lists the damage.
func Check(tx *bbolt.Tx) error {
	var errs []error
	for err := range tx.Check() { // drain the channel, or the goroutine that fills it would never end
		if len(errs) < maxReported {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
