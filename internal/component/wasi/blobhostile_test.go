package wasi

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestHostileBlobstore: no name leads out of a container, what is no object cannot be used, and the guest's calls are
// bounded.
func TestHostileBlobstore(t *testing.T) {
	g := newBlobGuest(t)
	g.put("a", "hello")
	outside := t.TempDir()
	for _, err := range []error{
		os.WriteFile(filepath.Join(outside, "secret"), []byte("secret"), 0o644), os.Symlink(outside, filepath.Join(g.dir, "out")),
		os.Symlink("c", filepath.Join(g.dir, "alias")), os.WriteFile(filepath.Join(g.dir, "file"), nil, 0o644),
		os.Symlink(filepath.Join(outside, "secret"), filepath.Join(g.dir, "c", "link")), os.Symlink("a", filepath.Join(g.dir, "c", "near")),
		os.Mkdir(filepath.Join(g.dir, "c", "directory"), 0o755), unix.Mkfifo(filepath.Join(g.dir, "c", "pipe"), 0o644),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"", ".", "..", "../c", "c/a", "/", "c/../../x", "a\x00", "..data", uploadsDir,
		strings.Repeat("n", maxBlobName+1)} {
		for _, f := range []string{"create-container", "get-container", "delete-container", "container-exists"} {
			refuses(t, f+" "+name, g.store(f, str(name)), errBlobName)
		}
		for _, f := range []string{"delete-object", "has-object", "object-info"} {
			refuses(t, f+" "+name, g.of(f, str(name)), errBlobName)
		}
		refuses(t, "get-data "+name, g.of("get-data", str(name), u64(0), u64(1)), errBlobName)
		for _, f := range []string{"copy-object", "move-object"} {
			refuses(t, f+" to "+name, g.store(f, str("c"), str("a"), str("c"), str(name)), errBlobName)
			refuses(t, f+" to container "+name, g.store(f, str("c"), str("a"), str(name), str("a")), errBlobName)
			refuses(t, f+" from "+name, g.store(f, str(name), str("a"), str("c"), str("b")), errBlobName)
		}
		value := g.types("[static]outgoing-value.new-outgoing-value").U32()
		refuses(t, "write-data "+name, g.of("write-data", str(name), u32(value)), errBlobName)
	}
	for _, name := range []string{"out", "alias", "file", "missing"} {
		refuses(t, "get-container "+name, g.store("get-container", str(name)), errNoContainer)
		refuses(t, "delete-container "+name, g.store("delete-container", str(name)), errNoContainer)
		refuses(t, "move-object to "+name, g.store("move-object", str("c"), str("a"), str(name), str("a")), errNoContainer)
	}
	for _, name := range []string{"link", "near", "directory", "pipe"} {
		refuses(t, "get-data "+name, g.of("get-data", str(name), u64(0), u64(1)), errNotObject)
		refuses(t, "delete-object "+name, g.of("delete-object", str(name)), errNotObject)
		refuses(t, "move-object "+name, g.store("move-object", str("c"), str(name), str("c"), str("b")), errNotObject)
		refuses(t, "copy-object to "+name, g.store("copy-object", str("c"), str("a"), str("c"), str(name)), errNotObject)
		value, _ := g.begin(name)
		refuses(t, "finish "+name, g.finish(value), errNotObject)
	}
	refuses(t, "get-data missing", g.of("get-data", str("missing"), u64(0), u64(1)), errNoObject)
	refuses(t, "get-data backwards", g.of("get-data", str("a"), u64(2), u64(1)), errBlobRange)
	refuses(t, "get-data beyond all files", g.of("get-data", str("a"), u64(1<<63), u64(1<<63)), errBlobRange)
	refuses(t, "create-container again", g.store("create-container", str("c")), errHasContainer)
	refuses(t, "many names", g.of("delete-objects", manyNames(maxBlobNames+1)), errBlobNames)

	large := filepath.Join(g.dir, "c", "large")
	if err := os.WriteFile(large, bytes.Repeat([]byte{'x'}, maxBlob+1), 0o600); err != nil {
		t.Fatal(err)
	}
	value := ok(t, g.of("get-data", str("large"), u64(0), u64(maxBlob))).U32()
	refuses(t, "a large value in one piece", g.types("[static]incoming-value.incoming-value-consume-sync", u32(value)), errBlobSize)

	for range maxOpen {
		ok(t, g.of("get-data", str("a"), u64(0), u64(0)))
	}
	refuses(t, "many values", g.of("get-data", str("a"), u64(0), u64(0)), unix.EMFILE)
	refuses(t, "many lists", g.of("list-objects"), unix.EMFILE)
	put, body := g.begin("b")
	failed(t, g.write(body, "x"), 0)
	refuses(t, "many uploads", g.finish(put), unix.EMFILE)

	q := &share{most: 1000}
	bounded := blobGuestIn(t, g.dir, Options{Bytes: q})
	bounded.container = ok(t, bounded.store("get-container", str("c"))).U32()
	value = ok(t, bounded.of("get-data", str("large"), u64(0), u64(999))).U32()
	if _, err := bounded.try("wasi:blobstore/types", "[static]incoming-value.incoming-value-consume-sync", u32(value)); !errors.Is(err,
		ErrHeld) {
		t.Errorf("a value beyond the limit of host memory: %v", err)
	}
	if q.used != 0 {
		t.Errorf("%d bytes are held after the calls", q.used)
	}
	without := &blobGuest{guest: newGuest(t, Options{})}
	refuses(t, "without a volume", without.store("container-exists", str("c")), errNoBlobs)
}

// manyNames encodes a list of the same name.
func manyNames(n int) []byte {
	names := make([][]string, n)
	for i := range names {
		names[i] = []string{"a"}
	}
	return lists(names...)
}
