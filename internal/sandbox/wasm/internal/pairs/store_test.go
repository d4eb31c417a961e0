package pairs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/test/races"
)

func free(int) error { return nil }

var large = Limits{Bytes: 1 << 30, Keys: 1 << 20}

func (s *Store) mustGet(t *testing.T, key string) string {
	t.Helper()
	values, err := s.Get(t.Context(), free, key)
	if err != nil {
		t.Fatal(err)
	}
	if values[0] == nil {
		return "none"
	}
	return string(values[0])
}

func (s *Store) mustSet(t *testing.T, pairs ...string) {
	t.Helper()
	var all []wasi.Pair
	for i := 0; i < len(pairs); i += 2 {
		all = append(all, wasi.Pair{Key: pairs[i], Value: []byte(pairs[i+1])})
	}
	if err := s.Set(t.Context(), all...); err != nil {
		t.Fatal(err)
	}
}

// allKeys returns all keys, and the number of calls.
func (s *Store) allKeys(t *testing.T) (keys []string, calls int) {
	t.Helper()
	for cursor := uint64(0); ; {
		some, next, err := s.Keys(t.Context(), free, cursor)
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, some...)
		if calls++; next == 0 {
			return keys, calls
		}
		cursor = next
	}
}

func TestStore(t *testing.T) {
	dir := t.TempDir()
	s, other := New(dir, large), New(dir, large)
	if got := s.mustGet(t, "a"); got != "none" {
		t.Errorf("a new store has %q", got)
	}
	s.mustSet(t, "a", "1", "", "empty key", "../a\x00", "", "a", "2")
	for key, want := range map[string]string{"a": "2", "": "empty key", "../a\x00": "", "b": "none"} {
		if got := other.mustGet(t, key); got != want {
			t.Errorf("Get(%q) = %q, want %q", key, got, want)
		}
		if exists, err := other.Exists(t.Context(), key); err != nil || exists != (want != "none") {
			t.Errorf("Exists(%q) = %v, %v", key, exists, err)
		}
	}
	if err := other.Delete(t.Context(), "", "b", "../a\x00"); err != nil {
		t.Fatal(err)
	}
	if keys, _ := s.allKeys(t); !slices.Equal(keys, []string{"a"}) {
		t.Errorf("after Delete the keys are %q", keys)
	}
	for _, c := range []struct {
		key   string
		delta int64
		want  string
	}{{"n", 0, "0"}, {"n", 5, "5"}, {"n", -7, "-2"}, {"a", 1, "3"}, {"n", -1 << 63, "error"}, {"text", 1, "error"}} {
		s.mustSet(t, "text", "x")
		sum, err := s.Increment(t.Context(), c.key, c.delta)
		got := fmt.Sprint(sum)
		if err != nil {
			got = "error"
		}
		if got != c.want || err != nil && !errors.Is(err, errNumber) {
			t.Errorf("Increment(%q, %d) = %d, %v; want %s", c.key, c.delta, sum, err, c.want)
		}
	}
	for _, c := range []struct {
		key        string
		old, value []byte
		want       bool
	}{{"s", []byte{}, []byte("1"), false}, {"s", nil, []byte("1"), true}, {"s", nil, []byte("2"), false},
		{"s", []byte("2"), []byte("3"), false}, {"s", []byte("1"), []byte{}, true}, {"s", []byte{}, []byte("4"), true}} {
		if swapped, err := s.Swap(t.Context(), c.key, c.old, c.value); err != nil || swapped != c.want {
			t.Errorf("Swap(%q, %q, %q) = %v, %v; want %v", c.key, c.old, c.value, swapped, err, c.want)
		}
	}
	if got := s.mustGet(t, "s"); got != "4" {
		t.Errorf("after the swaps the value is %q", got)
	}
	if size, changed, err := Stat(dir); err != nil || size == 0 || changed.IsZero() {
		t.Errorf("Stat = %d, %v, %v", size, changed, err)
	}
	if err := Remove(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	if keys, _ := s.allKeys(t); keys != nil {
		t.Errorf("after Remove the keys are %q", keys)
	}
	s.mustSet(t, "a", "again")
	if got := other.mustGet(t, "a"); got != "again" {
		t.Errorf("after Remove and Set the value is %q", got)
	}
}

// TestKeysDuringChanges: keys that exist during all calls of Keys are returned once, whatever happens to others.
func TestKeysDuringChanges(t *testing.T) {
	s := New(t.TempDir(), large)
	var pairs []string
	for i := range 2*pageKeys + 10 {
		pairs = append(pairs, fmt.Sprintf("stays-%d", i), "", fmt.Sprintf("goes-%d", i), "")
	}
	s.mustSet(t, pairs...)
	seen, calls := map[string]int{}, 0
	for cursor := uint64(0); ; calls++ {
		keys, next, err := s.Keys(t.Context(), free, cursor)
		if err != nil {
			t.Fatal(err)
		}
		for _, key := range keys {
			seen[key]++
		}
		if next == 0 {
			break
		}
		cursor = next
		var gone []string
		for i := calls % 4; i < 2*pageKeys+10; i += 4 {
			gone = append(gone, fmt.Sprintf("goes-%d", i))
		}
		if err := s.Delete(t.Context(), gone...); err != nil {
			t.Fatal(err)
		}
		s.mustSet(t, fmt.Sprintf("new-%d", calls), "", "stays-0", "changed")
	}
	for i := range 2*pageKeys + 10 {
		if n := seen[fmt.Sprintf("stays-%d", i)]; n != 1 {
			t.Errorf("key stays-%d was returned %d times", i, n)
		}
	}
	if calls < 2 {
		t.Errorf("all keys were returned by %d calls", calls+1)
	}
}

// TestLimits: writes beyond a limit fail as a whole, and those that make the store smaller never do.
func TestLimits(t *testing.T) {
	dir := t.TempDir()
	s := New(dir, Limits{Bytes: 1000, Keys: 3})
	s.mustSet(t, "a", "1", "b", "2")
	if err := s.Set(t.Context(), wasi.Pair{Key: "c"}, wasi.Pair{Key: "d"}); !errors.Is(err, errFull) ||
		!strings.Contains(err.Error(), "4 of 3 keys") {
		t.Errorf("too many keys: %v", err)
	}
	if err := s.Set(t.Context(), wasi.Pair{Key: "a", Value: []byte("new")}, wasi.Pair{Key: "c", Value: make([]byte, 900)}); !errors.Is(err,
		errFull) || !strings.Contains(err.Error(), "of 1000 bytes") {
		t.Errorf("too many bytes: %v", err)
	}
	if a, c := s.mustGet(t, "a"), s.mustGet(t, "c"); a != "1" || c != "none" {
		t.Errorf("after writes that failed: a = %q, c = %q", a, c)
	}
	if _, err := s.Swap(t.Context(), "a", []byte("1"), make([]byte, 1000)); !errors.Is(err, errFull) {
		t.Errorf("a swap beyond the limit: %v", err)
	}
	smaller := New(dir, Limits{Bytes: 1, Keys: 1})
	smaller.mustSet(t, "a", "")
	if _, err := smaller.Increment(t.Context(), "c", 1); !errors.Is(err, errFull) {
		t.Errorf("increment beyond the limit: %v", err)
	}
	if err := smaller.Delete(t.Context(), "a", "b"); err != nil {
		t.Fatal(err)
	}
	// What was deleted no longer counts, to the byte.
	s.mustSet(t, "k", strings.Repeat("x", 1000-pairBytes-1))
	if err := s.Set(t.Context(), wasi.Pair{Key: "l"}); !errors.Is(err, errFull) {
		t.Errorf("a pair in a full store: %v", err)
	}
	full := errors.New("no memory")
	if _, err := s.Get(t.Context(), func(int) error { return full }, "k"); !errors.Is(err, full) {
		t.Errorf("Get beyond the caller's memory: %v", err)
	}
	if _, _, err := s.Keys(t.Context(), func(int) error { return full }, 0); !errors.Is(err, full) {
		t.Errorf("Keys beyond the caller's memory: %v", err)
	}
}

// TestFileIsBounded: whatever a guest writes and deletes, the file stays below its limit, and the store usable.
func TestFileIsBounded(t *testing.T) {
	s := New(t.TempDir(), Limits{Bytes: 8 << 20, Keys: 1000})
	value := bytes.Repeat([]byte{'x'}, 4<<20)
	for i := range 60 {
		if err := s.Set(t.Context(), wasi.Pair{Key: fmt.Sprint(i % 3), Value: value[:len(value)*(i%5)/5]}); err != nil &&
			!errors.Is(err, errFull) {
			t.Fatal(err)
		}
	}
	size, _, err := Stat(s.dir)
	if err != nil || size > int64(s.maxSize()) {
		t.Errorf("the file has %d bytes, want at most %d: %v", size, s.maxSize(), err)
	}
	s.mustSet(t, "0", "small")
}

// TestConcurrently: no increment of several stores is lost, and a batch is seen whole.
func TestConcurrently(t *testing.T) {
	dir := t.TempDir()
	const workers, each = 4, 8
	var all sync.WaitGroup
	stores := []*Store{New(dir, large), New(dir, large)}
	for w := range workers {
		all.Go(func() {
			s := stores[w%2]
			for i := range each {
				if _, err := s.Increment(t.Context(), "n", 1); err != nil {
					t.Error(err)
				}
				text := []byte(fmt.Sprint(w, i))
				if err := s.Set(t.Context(), wasi.Pair{Key: "a", Value: text}, wasi.Pair{Key: "b", Value: text}); err != nil {
					t.Error(err)
				}
				if values, err := s.Get(t.Context(), free, "a", "b"); err != nil || !bytes.Equal(values[0], values[1]) {
					t.Errorf("a batch is seen as %q, %v", values, err)
				}
			}
		})
	}
	all.Wait()
	if got := New(dir, large).mustGet(t, "n"); got != fmt.Sprint(workers*each) {
		t.Errorf("n = %s, want %d", got, workers*each)
	}
}

// TestLockIsBounded: an operation ends with its context while another process holds the lock.
func TestLockIsBounded(t *testing.T) {
	s := New(t.TempDir(), large)
	s.mustSet(t, "a", "1")
	held, err := lock(t.Context(), s.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	cause := errors.New("the request has ended")
	ctx, cancel := context.WithCancelCause(t.Context())
	time.AfterFunc(20*time.Millisecond, func() { cancel(cause) })
	if _, err := s.Exists(ctx, "a"); !errors.Is(err, cause) {
		t.Errorf("an operation without the lock: %v", err)
	}
}

// TestDamage: a damaged file is an error, and never ends the process.
func TestDamage(t *testing.T) {
	for name, damage := range map[string]func(path string) error{
		"empty":     func(path string) error { return os.Truncate(path, 0) },
		"short":     func(path string) error { return os.Truncate(path, 2*4096+1) },
		"text":      func(path string) error { return os.WriteFile(path, bytes.Repeat([]byte("text"), 10_000), 0o600) },
		"directory": func(path string) error { return errors.Join(os.Remove(path), os.Mkdir(path, 0o700)) },
		"pages": func(path string) error {
			file, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				return err
			}
			info, err := file.Stat()
			if err == nil { // all but the two pages that say where the others are
				_, err = file.WriteAt(bytes.Repeat([]byte{0xff}, int(info.Size())-2*os.Getpagesize()), 2*int64(os.Getpagesize()))
			}
			return errors.Join(err, file.Close())
		},
	} {
		s := New(t.TempDir(), large)
		for i := range 1000 {
			s.mustSetMany(t, i)
		}
		if err := damage(filepath.Join(s.dir, fileName)); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Get(t.Context(), free, "999"); err == nil || strings.Contains(err.Error(), s.dir) {
			t.Errorf("%s: Get: %v, want an error without a path", name, err)
		}
		if err := New(s.dir, large).Set(t.Context(), wasi.Pair{Key: "a"}); err == nil || strings.Contains(err.Error(), s.dir) {
			t.Errorf("%s: Set: %v, want an error without a path", name, err)
		}
		if name == "directory" {
			continue
		}
		before := descriptors(t)
		for range 100 {
			if err := s.Set(t.Context(), wasi.Pair{Key: "a"}); !errors.Is(err, errDamaged) {
				t.Errorf("%s: Set again: %v, want %v", name, err, errDamaged)
			}
		}
		if after := descriptors(t); after > before {
			t.Errorf("%s: %d files were left open", name, after-before)
		}
		if err := Remove(t.Context(), s.dir); err != nil {
			t.Fatal(err)
		}
		for i := range 3 { // a new file, perhaps with the inode of the damaged one
			s.mustSet(t, "a", fmt.Sprint(i))
		}
		if after := descriptors(t); after >= before {
			t.Errorf("%s: the damaged file is still open", name)
		}
	}
	s := New(t.TempDir(), large)
	if err := os.Symlink(filepath.Join(t.TempDir(), "elsewhere"), filepath.Join(s.dir, lockName)); err != nil {
		t.Fatal(err)
	}
	if err := Remove(t.Context(), s.dir); !errors.Is(err, unix.ELOOP) {
		t.Errorf("a lock that is a link: %v", err)
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func (s *Store) mustSetMany(t *testing.T, n int) {
	t.Helper()
	if n%250 != 0 {
		return
	}
	var pairs []string
	for i := range 250 {
		pairs = append(pairs, fmt.Sprint(n+i), strings.Repeat("v", 100))
	}
	s.mustSet(t, pairs...)
}

const writerDir = "TRIPOD_TEST_NODESTORE"

func TestMain(m *testing.M) {
	dir := os.Getenv(writerDir)
	if dir == "" {
		os.Exit(races.Run(m.Run))
	}
	for s := New(dir, large); ; {
		n, err := s.Increment(context.Background(), "n", 1)
		if err == nil {
			text := []byte(fmt.Sprint(n))
			err = s.Set(context.Background(), wasi.Pair{Key: "a", Value: text}, wasi.Pair{Key: "b", Value: text})
		}
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println(n)
	}
}

// TestKilledWriters: what a writer was told to be done is there after its SIGKILL, and no batch is there in part.
func TestKilledWriters(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s := New(t.TempDir(), large)
	for range 5 {
		var told bytes.Buffer
		c := exec.Command(self)
		c.Env = append(os.Environ(), writerDir+"="+s.dir)
		first := make(chan struct{})
		var once sync.Once
		c.Stdout = writer(func(p []byte) (int, error) {
			once.Do(func() { close(first) })
			return told.Write(p)
		})
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		<-first
		if _, err := s.Increment(t.Context(), "m", 1); err != nil { // beside the writer
			t.Error(err)
		}
		_ = c.Process.Kill()
		_ = c.Wait()
		lines := strings.Fields(told.String())
		last := 0
		if _, err := fmt.Sscan(lines[len(lines)-1], &last); err != nil {
			t.Fatalf("the writer said %q", told.String())
		}
		if n, err := s.Increment(t.Context(), "n", 0); err != nil || n < int64(last) || n > int64(last)+1 {
			t.Errorf("after the writer was killed n = %d, %v; it was told %d", n, err, last)
		}
		if a, b := s.mustGet(t, "a"), s.mustGet(t, "b"); a != b {
			t.Errorf("a batch is there in part: %s and %s", a, b)
		}
	}
	if got := s.mustGet(t, "m"); got != "5" {
		t.Errorf("m = %s, want 5", got)
	}
}

type writer func(p []byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

// BenchmarkStore measures one call, with the opening of the file.
func BenchmarkStore(b *testing.B) {
	s := New(b.TempDir(), large)
	var pairs []wasi.Pair
	for i := range 10_000 {
		pairs = append(pairs, wasi.Pair{Key: fmt.Sprint(i), Value: make([]byte, 1000)})
	}
	if err := s.Set(b.Context(), pairs...); err != nil {
		b.Fatal(err)
	}
	b.Run("get", func(b *testing.B) {
		for b.Loop() {
			if _, err := s.Get(b.Context(), free, "50"); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("increment", func(b *testing.B) {
		for b.Loop() {
			if _, err := s.Increment(b.Context(), "n", 1); err != nil {
				b.Fatal(err)
			}
		}
	})
}
