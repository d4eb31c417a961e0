package wasi

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// blobGuest is a guest with a container "c" in a store.
type blobGuest struct {
	*guest
	dir       string
	container uint32
}

func newBlobGuest(t *testing.T) *blobGuest {
	g := blobGuestIn(t, t.TempDir(), Options{})
	g.container = ok(t, g.store("create-container", str("c"))).U32()
	return g
}

func blobGuestIn(t *testing.T, dir string, o Options) *blobGuest {
	o.Blobs = NewBlobs(dir)
	return &blobGuest{guest: newGuest(t, o), dir: dir}
}

func (g *blobGuest) store(name string, params ...[]byte) *wit.Reader {
	g.t.Helper()
	return g.call("wasi:blobstore/blobstore", name, params...)
}

func (g *blobGuest) types(name string, params ...[]byte) *wit.Reader {
	g.t.Helper()
	return g.call("wasi:blobstore/types", name, params...)
}

// of calls a method of the container.
func (g *blobGuest) of(name string, params ...[]byte) *wit.Reader {
	g.t.Helper()
	return g.call("wasi:blobstore/container", "[method]container."+name, append([][]byte{u32(g.container)}, params...)...)
}

// begin makes a value for an object, and returns it with the stream of its bytes.
func (g *blobGuest) begin(name string) (value, body uint32) {
	g.t.Helper()
	value = g.types("[static]outgoing-value.new-outgoing-value").U32()
	body = ok(g.t, g.types("[method]outgoing-value.outgoing-value-write-body", u32(value))).U32()
	ok(g.t, g.of("write-data", str(name), u32(value)))
	return value, body
}

func (g *blobGuest) write(body uint32, data string) *wit.Reader {
	g.t.Helper()
	return g.call(streams, "[method]output-stream.blocking-write-and-flush", u32(body), list([]byte(data)))
}

func (g *blobGuest) finish(value uint32) *wit.Reader {
	g.t.Helper()
	return g.types("[static]outgoing-value.finish", u32(value))
}

func (g *blobGuest) put(name, data string) {
	g.t.Helper()
	value, body := g.begin(name)
	ok(g.t, g.write(body, data))
	ok(g.t, g.finish(value))
}

// get returns a part of an object in one piece.
func (g *blobGuest) get(name string, start, end uint64) string {
	g.t.Helper()
	value := ok(g.t, g.of("get-data", str(name), u64(start), u64(end))).U32()
	return string(ok(g.t, g.types("[static]incoming-value.incoming-value-consume-sync", u32(value))).Bytes())
}

// refuses requires an error with the given text.
func refuses(t *testing.T, what string, r *wit.Reader, want error) {
	t.Helper()
	if r.Case(2) != 1 {
		t.Errorf("%s: the result is ok, want %v", what, want)
	} else if got := r.String(); got != want.Error() {
		t.Errorf("%s: %q, want %v", what, got, want)
	}
}

// stored returns the files of a directory, and of those below it.
func stored(t *testing.T, dir string) (files []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			name, _ := filepath.Rel(dir, path)
			files = append(files, name)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func TestBlobstore(t *testing.T) {
	g := newBlobGuest(t)
	g.put("a", "hello, world")
	for _, c := range []struct {
		start, end uint64
		want       string
	}{{0, 11, "hello, world"}, {0, 0, "h"}, {7, 100, "world"}, {11, math.MaxUint64, "d"}, {12, 20, ""}, {math.MaxInt64, math.MaxInt64, ""}} {
		if got := g.get("a", c.start, c.end); got != c.want {
			t.Errorf("get-data(%d, %d) = %q, want %q", c.start, c.end, got, c.want)
		}
	}
	g.put("empty", "")
	if got := g.get("empty", 0, 0); got != "" {
		t.Errorf("an empty object is %q", got)
	}
	info := ok(t, g.of("object-info", str("a")))
	file, err := os.Stat(filepath.Join(g.dir, "c", "a"))
	if name, container, at, size := info.String(), info.String(), info.U64(), info.U64(); err != nil ||
		name != "a" || container != "c" || at != uint64(file.ModTime().Unix()) || size != 12 {
		t.Errorf("object-info = %q, %q, %d, %d; the file is %v, %v", name, container, at, size, file, err)
	}
	meta := ok(t, g.of("info"))
	if name, at := meta.String(), meta.U64(); name != "c" || at == 0 || at > uint64(file.ModTime().Unix()) {
		t.Errorf("info = %q, %d", name, at)
	}

	ok(t, g.store("create-container", str("d")))
	ok(t, g.store("copy-object", str("c"), str("a"), str("d"), str("b")))
	ok(t, g.store("move-object", str("c"), str("a"), str("d"), str("a")))
	if got := stored(t, g.dir); !slices.Equal(got, []string{"c/empty", "d/a", "d/b"}) {
		t.Errorf("after a copy and a move the files are %q", got)
	}
	if ok(t, g.of("has-object", str("a"))).Bool() || !ok(t, g.of("has-object", str("empty"))).Bool() {
		t.Error("has-object is wrong")
	}
	ok(t, g.of("delete-object", str("missing")))
	ok(t, g.of("delete-objects", lists([]string{"empty"}, []string{"missing"})))
	g.put("x", "1")
	ok(t, g.of("clear"))
	ok(t, g.store("delete-container", str("d")))
	if got := stored(t, g.dir); got != nil {
		t.Errorf("after all was deleted the files are %q", got)
	}
	if ok(t, g.store("container-exists", str("d"))).Bool() || !ok(t, g.store("container-exists", str("c"))).Bool() {
		t.Error("container-exists is wrong")
	}
	if got := ok(t, g.of("name")).String(); got != "c" {
		t.Errorf("name = %q", got)
	}
}

// TestBlobsAreWhole: an object appears when its value is finished, and a reader keeps the object that it has opened.
func TestBlobsAreWhole(t *testing.T) {
	g := newBlobGuest(t)
	g.put("a", "first")
	old := ok(t, g.of("get-data", str("a"), u64(1), u64(3))).U32()
	if size := g.types("[method]incoming-value.size", u32(old)).U64(); size != 3 {
		t.Errorf("size = %d, want 3", size)
	}

	value, body := g.begin("a")
	ok(t, g.write(body, "the "))
	if got := g.get("a", 0, 100); got != "first" {
		t.Errorf("during a write the object is %q", got)
	}
	ok(t, g.write(body, "second"))
	ok(t, g.finish(value))
	if got := g.get("a", 0, 100); got != "the second" {
		t.Errorf("after finish the object is %q", got)
	}
	failed(t, g.write(body, "late"), 1) // closed
	stream := ok(t, g.types("[static]incoming-value.incoming-value-consume-async", u32(old))).U32()
	if got := string(ok(t, g.call(streams, "[method]input-stream.blocking-read", u32(stream), u64(100))).Bytes()); got != "irs" {
		t.Errorf("the stream of the previous object has %q, want irs", got)
	}
	failed(t, g.call(streams, "[method]input-stream.blocking-read", u32(stream), u64(100)), 1)

	// The bytes can come before the name, too.
	value = g.types("[static]outgoing-value.new-outgoing-value").U32()
	body = ok(t, g.types("[method]outgoing-value.outgoing-value-write-body", u32(value))).U32()
	if g.types("[method]outgoing-value.outgoing-value-write-body", u32(value)).Case(2) != 1 {
		t.Error("a value has two streams")
	}
	ok(t, g.write(body, "third"))
	ok(t, g.of("write-data", str("b"), u32(value)))
	refuses(t, "a second object", g.of("write-data", str("e"), u32(value)), errBlobTarget)
	ok(t, g.finish(value))

	// A value that is dropped leaves nothing, nor does one without a name.
	value, body = g.begin("d")
	ok(t, g.write(body, "lost"))
	g.Drop(value)
	value = g.types("[static]outgoing-value.new-outgoing-value").U32()
	body = ok(t, g.types("[method]outgoing-value.outgoing-value-write-body", u32(value))).U32()
	ok(t, g.write(body, "lost"))
	refuses(t, "finish without write-data", g.finish(value), errNoTarget)
	// Nor does one whose container disappears.
	value, body = g.begin("d")
	ok(t, g.write(body, "lost"))
	if got := stored(t, g.dir); len(got) != 3 {
		t.Errorf("during a write the files are %q", got)
	}
	ok(t, g.store("delete-container", str("c")))
	refuses(t, "finish without a container", g.finish(value), errNoContainer)
	if got := stored(t, g.dir); got != nil {
		t.Errorf("the files are %q", got)
	}
	if g.State.open != 1 { // the stream
		t.Errorf("%d files are open, want 1", g.State.open)
	}
}

// TestBlobLeftovers: a Blobs removes what writers have left that were killed, and nothing that is being written.
func TestBlobLeftovers(t *testing.T) {
	first := newBlobGuest(t)
	value, body := first.begin("a")
	ok(t, first.write(body, "half"))
	uploads := filepath.Join(first.dir, uploadsDir)
	for _, err := range []error{
		os.WriteFile(filepath.Join(uploads, "killed"), []byte("half"), 0o600), os.Mkdir(filepath.Join(uploads, "deleted"), 0o700),
		os.WriteFile(filepath.Join(uploads, "deleted", "object"), nil, 0o600),
		os.Mkdir(filepath.Join(uploads, "deleted", "directory"), 0o700),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	second := blobGuestIn(t, first.dir, Options{})
	second.container = ok(t, second.store("get-container", str("c"))).U32()
	second.put("b", "whole")
	if got := stored(t, uploads); len(got) != 1 || got[0] == "killed" {
		t.Errorf("the uploads are %q, want the one in progress", got)
	}
	ok(t, first.write(body, " and half"))
	ok(t, first.finish(value))
	if got := second.get("a", 0, 100); got != "half and half" {
		t.Errorf("the object is %q", got)
	}
}

// makeDeep makes directories below each other, each with a file.
func makeDeep(t *testing.T, top string, depth int) {
	t.Helper()
	dir, err := unix.Open(top, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	for i := 0; i < depth && err == nil; i++ {
		var file, below int
		if file, err = unix.Openat(dir, "file", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600); err != nil {
			break
		}
		_ = unix.Close(file)
		if err = unix.Mkdirat(dir, "d", 0o700); err != nil {
			break
		}
		if below, err = unix.Openat(dir, "d", unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err == nil {
			_ = unix.Close(dir)
			dir = below
		}
	}
	_ = unix.Close(dir)
	if err != nil {
		t.Fatal(err)
	}
}

// limitFiles makes the process fail to open more than n files besides those that are open, until the end of the test.
func limitFiles(t *testing.T, n int) {
	t.Helper()
	next, err := os.Open("/")
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(next.Fd()) + uint64(n), Max: before.Max}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
			t.Error(err)
		}
	})
}

// TestDeleteDeepContainer: the depth of a tree costs neither files nor memory, and the deletion ends with its context.
func TestDeleteDeepContainer(t *testing.T) {
	g := newBlobGuest(t)
	g.put("a", "x")
	top := filepath.Join(g.dir, "c")
	makeDeep(t, top, 3000)
	for i := range 2 * listStep {
		if err := errors.Join(os.Mkdir(filepath.Join(top, fmt.Sprint(i)), 0o700),
			os.WriteFile(filepath.Join(top, fmt.Sprint(i), "file"), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(g.dir, filepath.Join(top, "d", "link")); err != nil {
		t.Fatal(err)
	}
	limitFiles(t, 16)
	ctx := &endsAfter{Context: context.Background(), checks: 100}
	if err := g.options.Blobs.remove(ctx, "c"); !errors.Is(err, context.Canceled) {
		t.Errorf("remove at the end of the request: %v", err)
	}
	if ok(t, g.store("container-exists", str("c"))).Bool() {
		t.Error("the container still exists")
	}
	left, err := os.ReadDir(filepath.Join(g.dir, uploadsDir))
	if err != nil || len(left) != 1 {
		t.Fatalf("the uploads are %v, %v; want the rest of the container", left, err)
	}
	if err := os.Rename(filepath.Join(g.dir, uploadsDir, left[0].Name()), top); err != nil {
		t.Fatal(err)
	}
	ok(t, g.store("delete-container", str("c")))
	if left, err := os.ReadDir(filepath.Join(g.dir, uploadsDir)); err != nil || len(left) != 0 {
		t.Errorf("the uploads are %v, %v; want none", left, err)
	}
}

// endsAfter is a context that ends after some checks.
type endsAfter struct {
	context.Context
	checks int
}

func (e *endsAfter) Err() error {
	if e.checks--; e.checks < 0 {
		return context.Canceled
	}
	return nil
}

// TestBlobCleaningGoesOn: the removal of leftovers ends with the guest's call, another call goes on, and nobody waits.
func TestBlobCleaningGoesOn(t *testing.T) {
	g := newBlobGuest(t)
	uploads := filepath.Join(g.dir, uploadsDir)
	leave := func(name string) {
		if err := errors.Join(os.MkdirAll(filepath.Join(uploads, name, "d", "e"), 0o700),
			os.WriteFile(filepath.Join(uploads, name, "d", "file"), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	during := func(ctx context.Context, f func()) {
		before := g.ctx
		g.ctx = ctx
		f()
		g.ctx = before
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()

	leave("killed")
	during(ended, func() { g.begin("a") })
	if got := stored(t, uploads); len(got) != 1 {
		t.Fatalf("a call that has ended removes leftovers: %q", got)
	}
	g.put("a", "x")
	if got := stored(t, uploads); got != nil {
		t.Errorf("the next call leaves %q", got)
	}

	// What a deletion leaves is a leftover, too.
	if err := os.MkdirAll(filepath.Join(g.dir, "d", "e", "f"), 0o700); err != nil {
		t.Fatal(err)
	}
	during(ended, func() {
		if _, err := g.try("wasi:blobstore/blobstore", "delete-container", str("d")); !errors.Is(err, context.Canceled) {
			t.Errorf("delete-container at the end of the request: %v", err)
		}
	})
	g.put("a", "y")
	if left, err := os.ReadDir(uploads); err != nil || len(left) != 0 {
		t.Errorf("after a deletion that ended early the uploads are %v, %v", left, err)
	}

	leave("large")
	second := blobGuestIn(t, g.dir, Options{})
	second.container = ok(t, second.store("get-container", str("c"))).U32()
	cleaning, goOn, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		second.options.Blobs.prepare(&blocked{Context: context.Background(), reached: cleaning, until: goOn})
	}()
	<-cleaning
	second.put("b", "during the cleaning")
	close(goOn)
	<-done
	if got := stored(t, uploads); got != nil {
		t.Errorf("the cleaning leaves %q", got)
	}
}

// blocked is a context whose first check waits.
type blocked struct {
	context.Context
	once           sync.Once
	reached, until chan struct{}
}

func (b *blocked) Err() error {
	b.once.Do(func() {
		close(b.reached)
		<-b.until
	})
	return nil
}

func TestBlobsAreListed(t *testing.T) {
	g := newBlobGuest(t)
	const count = 2*maxBlobNames + 500
	for i := range count {
		if err := os.WriteFile(filepath.Join(g.dir, "c", fmt.Sprint(i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Mkdir(filepath.Join(g.dir, "c", "directory"), 0o700),
		os.Symlink("0", filepath.Join(g.dir, "c", "link"))); err != nil {
		t.Fatal(err)
	}
	stream := ok(t, g.of("list-objects")).U32()
	next := func(name string, n uint64) *wit.Reader {
		return ok(t, g.call("wasi:blobstore/container", "[method]stream-object-names."+name, u32(stream), u64(n)))
	}
	seen := map[string]bool{}
	for _, want := range []int{0, 1, 7, maxBlobNames} {
		r := next("read-stream-object-names", uint64(want))
		n := r.Len()
		for range n {
			seen[r.String()] = true
		}
		if r.Bool() || n != want {
			t.Errorf("read-stream-object-names(%d) returned %d names, or the end", want, n)
		}
	}
	if r := next("skip-stream-object-names", 400); r.U64() != 400 || r.Bool() {
		t.Error("skip-stream-object-names(400) has not skipped 400 names")
	}
	r := next("read-stream-object-names", math.MaxUint64)
	n := r.Len()
	for range n {
		seen[r.String()] = true
	}
	if n != maxBlobNames || len(seen) != 8+2*maxBlobNames {
		t.Errorf("read-stream-object-names without a limit returned %d names, and all calls %d", n, len(seen))
	}
	if r := next("skip-stream-object-names", math.MaxUint64); r.U64() != count-2008-400 || !r.Bool() {
		t.Error("skip-stream-object-names has not reached the end")
	}
	if r := next("read-stream-object-names", 1); r.Len() != 0 || !r.Bool() {
		t.Error("there are names after the end")
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	g.ctx = ended
	if _, err := g.try("wasi:blobstore/container", "[method]container.clear", u32(g.container)); !errors.Is(err, context.Canceled) {
		t.Errorf("clear at the end of the request: %v", err)
	}
}
