package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"
)

func open(t testing.TB, path string) *Store {
	t.Helper()
	s, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func records(t *testing.T, s *Store, kind string) map[string]string {
	t.Helper()
	got := map[string]string{}
	if err := s.All(kind, func(k string, v []byte) error { got[k] = string(v); return nil }); err != nil {
		t.Fatal(err)
	}
	return got
}

func TestRecordsSurviveReopening(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.db")
	s := open(t, path)
	if !s.Fresh() {
		t.Error("Fresh of a new file = false, want true")
	}
	for _, err := range []error{s.Put("pods", "a", []byte("1")), s.Put("pods", "b", []byte("2")), s.Delete("pods", "a"),
		s.Delete("none", "x")} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if n, err := s.Next("id"); n != 0 || err != nil {
		t.Fatalf("first Next = %d, %v; want 0", n, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Put("pods", "c", nil); !errdefs.IsUnavailable(err) {
		t.Errorf("Put after Close: got error %v, want unavailable", err)
	}
	s = open(t, path)
	if s.Fresh() {
		t.Error("Fresh of an existing file = true, want false")
	}
	if got, want := records(t, s, "pods"), map[string]string{"b": "2"}; !maps.Equal(got, want) {
		t.Errorf("records after reopening: got %v, want %v", got, want)
	}
	if n, err := s.Next("id"); n != 1 || err != nil {
		t.Errorf("Next after reopening = %d, %v; want 1", n, err)
	}
	if err := s.Check(); err != nil {
		t.Error(err)
	}
}

func TestConcurrentWritesAllLand(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "node.db"))
	const writers = 100
	numbers := make([]uint64, writers)
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			if err := s.Put("pods", fmt.Sprint(i), []byte("x")); err != nil {
				t.Error(err)
			}
			var err error
			if numbers[i], err = s.Next("id"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := len(records(t, s, "pods")); got != writers {
		t.Errorf("got %d records, want %d", got, writers)
	}
	seen := map[uint64]bool{}
	for _, n := range numbers {
		if seen[n] {
			t.Errorf("Next returned %d twice", n)
		}
		seen[n] = true
	}
}

func TestOneBadWriteDoesNotHarmItsNeighbours(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "node.db"))
	good := request{apply: func(tx *bbolt.Tx) error {
		b, err := tx.CreateBucketIfNotExists([]byte("pods"))
		if err != nil {
			return err
		}
		return b.Put([]byte("good"), []byte("1"))
	}, done: make(chan error, 1)}
	bad := request{apply: func(*bbolt.Tx) error { return fmt.Errorf("bad") }, done: make(chan error, 1)}
	s.commit([]request{good, bad})
	if err := <-good.done; err != nil {
		t.Errorf("valid write: %v", err)
	}
	if err := <-bad.done; err == nil {
		t.Error("invalid write succeeded, want an error")
	}
	if records(t, s, "pods")["good"] != "1" {
		t.Error("the record of the valid write is missing")
	}
}

// TestN9LaterFormatIsRefused: a file of a later version stays untouched.
func TestN9LaterFormatIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.db")
	s := open(t, path)
	err := s.db.Update(func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketMeta).Put(keyFormat, binary.BigEndian.AppendUint32(nil, Format+1))
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Open of a later format: got error %v, want failed precondition", err)
	}
}

// TestN11FileThatIsNotWhole: Open rejects an incomplete file and does not change it.
func TestN11FileThatIsNotWhole(t *testing.T) {
	whole := filepath.Join(t.TempDir(), "whole.db")
	s, err := Open(whole)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 200 {
		if err := s.Put("pods", fmt.Sprint(i), make([]byte, 4096)); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(whole)
	if err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(t.TempDir(), "foreign.db")
	db, err := bbolt.Open(foreign, 0o600, nil)
	if err != nil {
		t.Fatal(err)
	}
	err = db.Update(func(tx *bbolt.Tx) error { _, err := tx.CreateBucket([]byte("v1")); return err })
	if err := errors.Join(err, db.Close()); err != nil {
		t.Fatal(err)
	}
	other, err := os.ReadFile(foreign)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{
		"empty": {}, "zeroes": make([]byte, len(raw)), "half": raw[:len(raw)/2], "first pages": raw[:4*os.Getpagesize()],
		"a few bytes": raw[:100],
		"text":        []byte("not a database"), "another program's": other,
	} {
		path := filepath.Join(t.TempDir(), "node.db")
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
		if s, err := Open(path); !errdefs.IsDataLoss(err) {
			t.Errorf("%s: Open = %v, %v; want data loss", name, s, err)
		}
		if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, content) {
			t.Errorf("%s: Open changed the file, %v", name, err)
		}
	}
}

// TestN11KilledWhileMade: Open ignores the remains of a process that died while it created the file.
func TestN11KilledWhileMade(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.db")
	if err := os.WriteFile(path+".new", []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if s := open(t, path); !s.Fresh() || s.ID() == "" {
		t.Errorf("got Fresh %v and ID %q, want a fresh file with an ID", s.Fresh(), s.ID())
	}
}

func TestIDStays(t *testing.T) {
	dir := t.TempDir()
	s := open(t, filepath.Join(dir, "a.db"))
	id := s.ID()
	_ = s.Close()
	if again := open(t, filepath.Join(dir, "a.db")); again.ID() != id {
		t.Errorf("ID after reopening = %q, want %q", again.ID(), id)
	}
	if other := open(t, filepath.Join(dir, "b.db")); other.ID() == id {
		t.Errorf("two files have the ID %q", id)
	}
}

func TestSecondOpenerIsTurnedAway(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.db")
	open(t, path)
	if _, err := Open(path); !errdefs.IsUnavailable(err) {
		t.Errorf("second Open: got error %v, want unavailable", err)
	}
}

func BenchmarkPut(b *testing.B) {
	for _, writers := range []int{1, 10} {
		b.Run(fmt.Sprintf("writers=%d", writers), func(b *testing.B) {
			s := open(b, filepath.Join(b.TempDir(), "node.db"))
			value := make([]byte, 4096)
			b.SetParallelism(writers)
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if err := s.Put("pods", "key", value); err != nil {
						b.Error(err)
					}
				}
			})
		})
	}
}

func TestUpdate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "node.db")
	s, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, update := range []struct {
		put    map[string][]byte
		remove []string
	}{{put: map[string][]byte{"a": []byte("1"), "b": []byte("2")}},
		{put: map[string][]byte{"c": []byte("3")}, remove: []string{"a", "none"}}} {
		if err := s.Update("k", update.put, update.remove); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s, err = Open(path); err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var got []string
	if err := s.All("k", func(key string, value []byte) error { got = append(got, key+string(value)); return nil }); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, []string{"b2", "c3"}) {
		t.Errorf("records: got %v, want b2 and c3", got)
	}
}

// TestRecordsCanBeWrittenWhileTheyAreRead: a write that enlarges the file waits for all reading transactions, so All
// must have none open while it calls the function.
func TestRecordsCanBeWrittenWhileTheyAreRead(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "node.db"))
	if err := s.Put("kind", "a", []byte("1")); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		done <- s.All("kind", func(string, []byte) error { return s.Put("kind", "b", make([]byte, 4<<20)) })
	}()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("a write waits for the function that All calls, and the function waits for the write")
	}
}
