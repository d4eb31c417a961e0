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

// whole returns the content of a valid file with several pages of each kind.
func whole(t *testing.T) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "whole.db")
	db, fresh, err := Open(path, options)
	if err != nil || !fresh {
		t.Fatalf("Open of a missing file: fresh = %v, %v, want true", fresh, err)
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

// TestN11FileThatIsNotWhole checks that Open refuses a damaged file and does not change it.
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
			for range 2 { // the first refusal must not change the second
				if db, _, err := Open(path, options); !errdefs.IsDataLoss(err) {
					t.Fatalf("Open = %v, %v, want data loss", db, err)
				}
			}
			if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, content) {
				t.Errorf("Open changed the file, or the file cannot be read: %v", err)
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
		t.Fatalf("Open of a valid file: fresh = %v, %v, want false", fresh, err)
	}
	defer db.Close()
	if _, _, err := Open(path, options); !errdefs.IsUnavailable(err) {
		t.Errorf("Open of an open file = %v, want unavailable", err)
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
		t.Errorf("Open of a file without our bucket = %v, want data loss", err)
	}
	if _, _, err := Open(filepath.Join(t.TempDir(), "none.db"), Options{ReadOnly: true}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Open of a missing file with ReadOnly = %v, want ErrNotExist", err)
	}
}

// TestKilledWhileMade checks that Open ignores the unfinished file of a process that died.
func TestKilledWhileMade(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.db")
	if err := os.WriteFile(path+".new", []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	db, fresh, err := Open(path, options)
	if err != nil || !fresh {
		t.Fatalf("Open: fresh = %v, %v, want true", fresh, err)
	}
	_ = db.Close()
}
