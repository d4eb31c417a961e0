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

// LockTimeout bounds the wait for another process that has the file open: one that is just ending.
const LockTimeout = 2 * time.Second

// Options say how a file is opened.
type Options struct {
	// Fill puts into a new file what a whole one has; nil: nothing.
	Fill func(*bbolt.Tx) error
	// Recognize says that a file which is there is one of the caller's; nil: any is. Its error needs no class.
	Recognize func(*bbolt.Tx) error
	// Shallow leaves out the walk over all pages, for callers that do it themselves.
	Shallow bool
	// ReadOnly opens a file that is there for reading.
	ReadOnly bool
}

// Open opens the file at path, and makes it when it is not there, which fresh tells. Errors: errdefs.ErrDataLoss for a file that is
// not whole or not the caller's, which is left as it is; errdefs.ErrUnavailable when another process holds it.
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
	db, err = open(path, o.ReadOnly)
	return db, fresh, err
}

func open(path string, readOnly bool) (db *bbolt.DB, err error) {
	defer recoverDamage(path, &err)
	db, err = bbolt.Open(path, 0o600, &bbolt.Options{
		Timeout: LockTimeout, FreelistType: bbolt.FreelistMapType, ReadOnly: readOnly, NoStatistics: true,
	})
	if errors.Is(err, bbolterrors.ErrTimeout) {
		return nil, fmt.Errorf("%s is held by another process: %w", path, errdefs.ErrUnavailable)
	}
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	return db, nil
}

// recoverDamage makes an error of a panic of bbolt's, which it has for pages that make no sense.
func recoverDamage(path string, err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("%s is damaged: %v: %w", path, p, errdefs.ErrDataLoss)
	}
}

// create makes a file that is there as a whole or not at all, whenever the process or the power goes.
func create(path string, fill func(*bbolt.Tx) error) error {
	draft := path + ".new"
	if err := os.Remove(draft); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	db, err := open(draft, false)
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

// syncDir makes a new directory entry survive a loss of power.
func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// verify looks at a file without changing it, and before anything is read that lies beyond its end, which would end the process.
func verify(path string, o Options) (err error) {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.Size() == 0 {
		return fmt.Errorf("%s is empty: %w", path, errdefs.ErrDataLoss)
	}
	db, err := open(path, true)
	if err != nil {
		if foreign(err) {
			err = fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
		}
		return err
	}
	defer db.Close()
	defer recoverDamage(path, &err)
	return db.View(func(tx *bbolt.Tx) error {
		if tx.Size() > info.Size() {
			return fmt.Errorf("%s is cut off: it has %d of %d bytes: %w", path, info.Size(), tx.Size(), errdefs.ErrDataLoss)
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

// foreign tells an error about what is in the file from one about reaching it, which has an errno.
func foreign(err error) bool {
	_, errno := errors.AsType[syscall.Errno](err)
	return !errno && !errdefs.IsUnavailable(err)
}

// maxDamages is how many damages Check reports: one bad page has a line for each that hung on it.
const maxDamages = 3

// Check walks over all pages and reports what is damaged.
func Check(tx *bbolt.Tx) error {
	var errs []error
	for err := range tx.Check() { // to the end: it runs beside
		if len(errs) < maxDamages {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
