package boltfile

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"
)

var bucket = []byte("things")

func fill(tx *bbolt.Tx) error { _, err := tx.CreateBucket(bucket); return err }

func recognize(tx *bbolt.Tx) error {
	if tx.Bucket(bucket) == nil {
		return errors.New("has no things")
	}
	return nil
}

var options = Options{Fill: fill, Recognize: recognize}

// whole is the content of a file with some pages of each kind.
func whole(t *testing.T) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "whole.db")
	db, fresh, err := Open(path, options)
	if err != nil || !fresh {
		t.Fatalf("a new file: fresh %v, %v", fresh, err)
	}
	for i := range 100 {
		err = errors.Join(err, db.Update(func(tx *bbolt.Tx) error {
			return tx.Bucket(bucket).Put(fmt.Append(nil, i), make([]byte, 4096))
		}))
	}
	if err = errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// TestN11FileThatIsNotWhole: it is refused, and stays as it is.
func TestN11FileThatIsNotWhole(t *testing.T) {
	raw := whole(t)
	page := os.Getpagesize()
	scribbled := bytes.Clone(raw)
	for i := 2 * page; i < len(scribbled); i++ {
		scribbled[i] = byte(i*7 + 1)
	}
	for name, content := range map[string][]byte{
		"empty": {}, "zeroes": make([]byte, len(raw)), "half": raw[:len(raw)/2], "first pages": raw[:4*page], "a few bytes": raw[:100],
		"little more than a page": raw[:page+100], "text": bytes.Repeat([]byte("not a database\n"), 2000), "scribbled over": scribbled,
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "node.db")
			if err := os.WriteFile(path, content, 0o600); err != nil {
				t.Fatal(err)
			}
			for range 2 { // the second time as the first
				if db, _, err := Open(path, options); !errdefs.IsDataLoss(err) {
					t.Fatalf("%v, %v; want data loss", db, err)
				}
			}
			if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, content) {
				t.Errorf("the file was changed, %v", err)
			}
		})
	}
}

func TestWholeFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.db")
	if err := os.WriteFile(path, whole(t), 0o600); err != nil {
		t.Fatal(err)
	}
	db, fresh, err := Open(path, options)
	if err != nil || fresh {
		t.Fatalf("fresh %v, %v", fresh, err)
	}
	defer db.Close()
	if _, _, err := Open(path, options); !errdefs.IsUnavailable(err) {
		t.Errorf("the second opener: %v, want unavailable", err)
	}
}

func TestAnothersFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.db")
	db, _, err := Open(path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	_ = db.Close()
	if _, _, err := Open(path, options); !errdefs.IsDataLoss(err) {
		t.Errorf("a file without our bucket: %v, want data loss", err)
	}
	if _, _, err := Open(filepath.Join(t.TempDir(), "none.db"), Options{ReadOnly: true}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that is to be read and is not there: %v", err)
	}
}

// TestKilledWhileMade: what a process left that died while it made the file is no file yet.
func TestKilledWhileMade(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.db")
	if err := os.WriteFile(path+".new", []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	db, fresh, err := Open(path, options)
	if err != nil || !fresh {
		t.Fatalf("fresh %v, %v", fresh, err)
	}
	_ = db.Close()
}
