package boltfile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/test/harness/testns"
)

func TestMain(m *testing.M) {
	testns.Reenter()
	if !testns.Inside() {
		os.Exit(testns.Run(append([]string{"/proc/self/exe"}, os.Args[1:]...), testns.Options{Strict: true}))
	}
	os.Exit(m.Run())
}

// smallDisk mounts a file system of 6 MiB and returns its path.
func smallDisk(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=6m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func fillDisk(t *testing.T, dir string) {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for chunk := 64 << 10; chunk >= 512; {
		if _, err := f.Write(make([]byte, chunk)); errors.Is(err, unix.ENOSPC) {
			chunk /= 2
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

func key(i int) []byte { return fmt.Appendf(nil, "pod-%03d", i) }

// removeOnFullDisk adds records, fills the disk, and then changes and removes each record. It returns the first error
// of a change or removal. reserve calls Reserve before each addition.
func removeOnFullDisk(t *testing.T, reserve bool) error {
	dir := smallDisk(t)
	path := filepath.Join(dir, "record.db")
	db, err := bbolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	const pods = 200
	for i := range pods {
		if reserve {
			if err := Reserve(path); err != nil {
				t.Fatal(err)
			}
		}
		err := db.Update(func(tx *bbolt.Tx) error {
			b, err := tx.CreateBucketIfNotExists(bucket)
			if err != nil {
				return err
			}
			return b.Put(key(i), make([]byte, 6000))
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	fillDisk(t, dir)
	for i := range pods {
		for _, change := range []func(b *bbolt.Bucket) error{
			func(b *bbolt.Bucket) error { return b.Put(key(i), make([]byte, 7000)) },
			func(b *bbolt.Bucket) error { return b.Delete(key(i)) },
		} {
			if err := db.Update(func(tx *bbolt.Tx) error { return change(tx.Bucket(bucket)) }); err != nil {
				return fmt.Errorf("pod %d: %w", i, err)
			}
		}
	}
	return nil
}

// TestFaultN5RemoveOnAFullDisk checks that all records can be removed on a full disk if Reserve was called before each
// was added.
func TestFaultN5RemoveOnAFullDisk(t *testing.T) {
	if err := removeOnFullDisk(t, true); err != nil {
		t.Error(err)
	}
	if err := removeOnFullDisk(t, false); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("removal without Reserve = %v, want ENOSPC (otherwise this test shows nothing)", err)
	}
}

func TestFaultN5ReserveOnAFullDisk(t *testing.T) {
	dir := smallDisk(t)
	path := filepath.Join(dir, "record.db")
	db, err := bbolt.Open(path, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	fillDisk(t, dir)
	if err := Reserve(path); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("Reserve on a full disk = %v, want ENOSPC", err)
	}
	if err := Reserve(filepath.Join(dir, "filler")); err == nil {
		t.Error("Reserve accepts a file of zeros")
	}
	if err := os.Remove(filepath.Join(dir, "filler")); err != nil {
		t.Fatal(err)
	}
	if err := Reserve(path); err != nil {
		t.Error(err)
	}
	if err := db.Update(func(tx *bbolt.Tx) error { _, err := tx.CreateBucket(bucket); return err }); err != nil {
		t.Error(err)
	}
}
