package guestbuild

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const (
	variable = "TRIPOD_GUEST_CACHE"
	standard = "/var/cache/tripod/guests"

	unused   = 14 * 24 * time.Hour // after which an entry is removed
	lockFile = "lock"
)

// cache is a directory with a file per entry. The time of a file is that of its last use.
type cache string

// open returns the machine's cache, or one that ends with the test if the machine's cannot be written.
func open(t testing.TB) cache {
	t.Helper()
	dir := os.Getenv(variable)
	if dir == "" {
		dir = standard
	}
	dir, err := filepath.Abs(dir)
	if err == nil {
		err = os.MkdirAll(dir, 0o755)
	}
	if err == nil {
		err = unix.Access(dir, unix.W_OK)
	}
	if err != nil {
		t.Logf("guests are built for this test alone, because %s cannot be used: %v", dir, err)
		return cache(t.TempDir())
	}
	return cache(dir)
}

// get returns the path of an entry. If the entry is missing, get calls make with the path of the file to write. Of
// several processes that need the same entry, one makes it and the others wait for it.
func (c cache) get(key string, make func(draft string) error) (string, error) {
	path := filepath.Join(string(c), key)
	if err := touch(path); !errors.Is(err, fs.ErrNotExist) {
		return path, err
	}
	lock, err := os.OpenFile(filepath.Join(string(c), lockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", err
	}
	defer lock.Close() // unlocks
	// One lock for all entries: a build uses all CPUs, and a lock per entry would have to be pruned too.
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		err = unix.Flock(int(lock.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		return "", fmt.Errorf("lock %s: %w", lock.Name(), err)
	}
	if err := touch(path); !errors.Is(err, fs.ErrNotExist) {
		return path, err
	}
	draft := path + ".draft" // one left by a killed process is replaced
	if err := make(draft); err != nil {
		os.Remove(draft)
		return "", err
	}
	if err := os.Rename(draft, path); err != nil {
		return "", err
	}
	return path, c.prune(time.Now().Add(-unused))
}

// touch marks a file as used. The error is fs.ErrNotExist if the file is missing, also if it has just been pruned.
func touch(path string) error {
	return os.Chtimes(path, time.Time{}, time.Now())
}

// prune removes the entries and drafts that were last used before a time. The caller holds the lock.
func (c cache) prune(before time.Time) error {
	entries, err := os.ReadDir(string(c))
	if err != nil {
		return err
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || e.Name() == lockFile || !info.Mode().IsRegular() || !info.ModTime().Before(before) {
			continue
		}
		if err := os.Remove(filepath.Join(string(c), e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}
