package wasi

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wit"
)

const fsys = "wasi:filesystem/types"

// preopened returns a guest with a directory /data, and the directory's descriptor.
func preopened(t *testing.T, readOnly bool) (g *guest, dir string, root uint32) {
	dir = t.TempDir()
	g = newGuest(t, Options{Preopens: []Preopen{{Path: dir, Guest: "/data", ReadOnly: readOnly}}})
	r := g.call("wasi:filesystem/preopens", "get-directories")
	if n := r.Len(); n != 1 {
		t.Fatalf("get-directories returned %d directories, want 1", n)
	}
	if root = r.U32(); r.String() != "/data" {
		t.Fatal("the directory is not called /data")
	}
	return g, dir, root
}

func caseOfErrno(e unix.Errno) int { return slices.Index(errorCodes[:], e) }

func (g *guest) open(dir uint32, name string, how, flags uint32) uint32 {
	g.t.Helper()
	return ok(g.t, g.call(fsys, "[method]descriptor.open-at", u32(dir), u32(symlinkFollow), str(name), u32(how), u32(flags))).U32()
}

func TestFilesAreWrittenAndRead(t *testing.T) {
	g, dir, root := preopened(t, false)
	ok(t, g.call(fsys, "[method]descriptor.create-directory-at", u32(root), str("sub")))
	f := g.open(root, "sub/file", openCreate|openExclusive, flagRead|flagWrite)
	if n := ok(t, g.call(fsys, "[method]descriptor.write", u32(f), list([]byte("hello")), u64(0))).U64(); n != 5 {
		t.Errorf("write = %d, want 5", n)
	}
	via := ok(t, g.call(fsys, "[method]descriptor.append-via-stream", u32(f))).U32()
	ok(t, g.call(streams, "[method]output-stream.blocking-write-and-flush", u32(via), list([]byte(", world"))))
	if data, err := os.ReadFile(filepath.Join(dir, "sub", "file")); err != nil || string(data) != "hello, world" {
		t.Errorf("the file contains %q, %v; want \"hello, world\"", data, err)
	}
	r := ok(t, g.call(fsys, "[method]descriptor.read", u32(f), u64(100), u64(7)))
	if data, end := string(r.Bytes()), r.Bool(); data != "world" || !end {
		t.Errorf("read = %q, end %v; want \"world\", true", data, end)
	}
	in := ok(t, g.call(fsys, "[method]descriptor.read-via-stream", u32(f), u64(5))).U32()
	if got := string(ok(t, g.call(streams, "[method]input-stream.blocking-read", u32(in), u64(100))).Bytes()); got != ", world" {
		t.Errorf("blocking-read = %q, want \", world\"", got)
	}
	failed(t, g.call(streams, "[method]input-stream.read", u32(in), u64(100)), 1)
	stat := ok(t, g.call(fsys, "[method]descriptor.stat-at", u32(root), u32(0), str("sub/file")))
	if kind, links, size := stat.U32(), stat.U64(), stat.U64(); kind != 6 || links != 1 || size != 12 {
		t.Errorf("stat: type %d, %d links, %d bytes; want 6, 1, 12", kind, links, size)
	}
	ok(t, g.call(fsys, "[method]descriptor.set-size", u32(f), u64(2)))
	sub := g.open(root, "sub", openDirectory, flagRead)
	ok(t, g.call(fsys, "[method]descriptor.rename-at", u32(sub), str("file"), u32(root), str("moved")))
	if data, err := os.ReadFile(filepath.Join(dir, "moved")); err != nil || string(data) != "he" {
		t.Errorf("the file contains %q, %v; want \"he\"", data, err)
	}
	failed(t, g.call(fsys, "[method]descriptor.remove-directory-at", u32(root), str("moved")), caseOfErrno(unix.ENOTDIR))
	failed(t, g.call(fsys, "[method]descriptor.unlink-file-at", u32(root), str("sub")), caseOfErrno(unix.EISDIR))
	ok(t, g.call(fsys, "[method]descriptor.unlink-file-at", u32(root), str("moved")))
	ok(t, g.call(fsys, "[method]descriptor.remove-directory-at", u32(root), str("sub")))
}

func TestDirectoriesAreListed(t *testing.T) {
	g, dir, root := preopened(t, true)
	var log []string
	g.options.Log = func(entry []byte) { log = append(log, string(entry)) }
	for _, name := range []string{"a", "b", "\xff", "caf\xe9"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, to := range map[string]string{"link": "a", "odd": "\xff"} {
		if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	list := ok(t, g.call(fsys, "[method]descriptor.read-directory", u32(root))).U32()
	var got []string
	for {
		r := ok(t, g.call(fsys, "[method]directory-entry-stream.read-directory-entry", u32(list)))
		if !r.Option() {
			break
		}
		kind := r.U32()
		got = append(got, string(rune('0'+kind))+r.String())
	}
	slices.Sort(got)
	if want := "5link 5odd 6a 6b"; strings.Join(got, " ") != want {
		t.Errorf("directory entries %v, want %s", got, want)
	}
	if len(log) != 1 || !strings.Contains(log[0], "level=WARN") || !strings.Contains(log[0], "not UTF-8: 2 of its entries") {
		t.Errorf("log = %q, want one warning about two entries", log)
	}
	if to := ok(t, g.call(fsys, "[method]descriptor.readlink-at", u32(root), str("link"))).String(); to != "a" {
		t.Errorf("readlink-at = %q, want \"a\"", to)
	}
	failed(t, g.call(fsys, "[method]descriptor.readlink-at", u32(root), str("odd")), caseOfErrno(unix.EILSEQ))
	failed(t, g.call(fsys, "[method]descriptor.open-at", u32(root), u32(0), str("link"), u32(0), u32(flagRead)), caseOfErrno(unix.ELOOP))
	same := func(a, b uint32) bool {
		return g.call(fsys, "[method]descriptor.is-same-object", u32(a), u32(b)).Bool()
	}
	a, link, b := g.open(root, "a", 0, flagRead), g.open(root, "link", 0, flagRead), g.open(root, "b", 0, flagRead)
	if !same(a, link) || same(a, b) {
		t.Error("is-same-object is false for a hard link, or true for another file")
	}
}

// TestNoWayOut: a guest cannot reach anything outside its directory, and errors reveal nothing about the outside.
func TestNoWayOut(t *testing.T) {
	g, dir, root := preopened(t, false)
	outside := filepath.Join(filepath.Dir(dir), "outside")
	if err := os.WriteFile(outside, []byte("secret"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(outside, filepath.Join(dir, "absolute")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../outside", filepath.Join(dir, "relative")); err != nil {
		t.Fatal(err)
	}
	perm := caseOfErrno(unix.EPERM)
	for _, name := range []string{"../outside", "absolute", "relative", "/etc/passwd", "x/../../outside"} {
		r := g.call(fsys, "[method]descriptor.open-at", u32(root), u32(symlinkFollow), str(name), u32(0), u32(flagRead))
		if r.Case(2) != 1 {
			t.Errorf("open-at opened %s", name)
		}
		if code := int(r.U32()); code != perm && code != caseOfErrno(unix.ENOENT) {
			t.Errorf("%s: error %d, want not-permitted or no-entry", name, code)
		}
		if g.call(fsys, "[method]descriptor.stat-at", u32(root), u32(symlinkFollow), str(name)).Case(2) != 1 {
			t.Errorf("stat-at of %s succeeded", name)
		}
	}
	failed(t, g.call(fsys, "[method]descriptor.create-directory-at", u32(root), str("../made")), perm)
	failed(t, g.call(fsys, "[method]descriptor.rename-at", u32(root), str("absolute"), u32(root), str("../renamed")), perm)
	ok(t, g.call(fsys, "[method]descriptor.create-directory-at", u32(root), str("sub")))
	sub := g.open(root, "sub", openDirectory, flagRead)
	failed(t, g.call(fsys, "[method]descriptor.stat-at", u32(sub), u32(0), str("..")), perm)
	failed(t, g.call(fsys, "[method]descriptor.rename-at", u32(root), str("absolute"), u32(sub), str("../../x")), perm)
}

func TestReadOnlyDirectories(t *testing.T) {
	g, dir, root := preopened(t, true)
	if err := os.WriteFile(filepath.Join(dir, "file"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	rofs := caseOfErrno(unix.EROFS)
	open := func(how, flags uint32) {
		t.Helper()
		failed(t, g.call(fsys, "[method]descriptor.open-at", u32(root), u32(0), str("file"), u32(how), u32(flags)), rofs)
	}
	open(0, flagRead|flagWrite)
	open(openTruncate, flagRead)
	open(openCreate, flagRead)
	failed(t, g.call(fsys, "[method]descriptor.unlink-file-at", u32(root), str("file")), rofs)
	failed(t, g.call(fsys, "[method]descriptor.symlink-at", u32(root), str("file"), str("link")), rofs)
	f := g.open(root, "file", 0, flagRead)
	failed(t, g.call(fsys, "[method]descriptor.write", u32(f), list([]byte("y")), u64(0)), caseOfErrno(unix.EBADF))
	failed(t, g.call(fsys, "[method]descriptor.set-times", u32(f), u32(0), u32(1)), rofs)
}

func TestOpenFilesAreBounded(t *testing.T) {
	g, dir, root := preopened(t, true)
	if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(dir, "pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	failed(t, g.call(fsys, "[method]descriptor.open-at", u32(root), u32(0), str("pipe"), u32(0), u32(flagRead)), caseOfErrno(unix.EPERM))
	for range maxOpen - 1 {
		g.open(root, "file", 0, flagRead)
	}
	failed(t, g.call(fsys, "[method]descriptor.open-at", u32(root), u32(0), str("file"), u32(0), u32(flagRead)), caseOfErrno(unix.EDQUOT))
	before := openFiles(t)
	g.Close()
	if g.State.open != 0 || before-openFiles(t) != maxOpen {
		t.Errorf("%d files were open, now %d; want %d fewer, and 0 counted instead of %d", before, openFiles(t), maxOpen, g.State.open)
	}
}

func openFiles(t *testing.T) int {
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// TestPreopensAreBounded: a guest that asks for its directories repeatedly cannot open more than maxOpen.
func TestPreopensAreBounded(t *testing.T) {
	g, _, _ := preopened(t, true)
	for n := 1; ; n++ {
		if _, err := g.try(strings.Replace(fsys, "types", "preopens", 1), "get-directories"); err != nil {
			if n != maxOpen {
				t.Errorf("get-directories failed at %d open directories (%v), want at %d", n, err, maxOpen)
			}
			break
		}
		if n > maxOpen {
			t.Fatalf("%d directories are open, want at most %d", n, maxOpen)
		}
	}
	g.Close()
	if g.State.open != 0 {
		t.Errorf("%d open directories are counted at the end, want 0", g.State.open)
	}
}

// share is a Quota for tests.
type share struct{ used, most int64 }

func (s *share) Take(n int64) bool {
	if s.used+n > s.most {
		return false
	}
	s.used += n
	return true
}

func (s *share) Give(n int64) { s.used -= n }

// TestFaultW7Quotas is row W7: instances share a limit of files and bytes. Dropping a handle and the guest's end give
// their share back.
func TestFaultW7Quotas(t *testing.T) {
	files, bytes := &share{most: 10}, &share{most: 1000}
	dir := t.TempDir()
	var all []*guest
	roots := map[*guest]uint32{}
	for range 2 {
		g := newGuest(t, Options{Preopens: []Preopen{{Path: dir, Guest: "/data"}}, Files: files, Bytes: bytes})
		r := g.call("wasi:filesystem/preopens", "get-directories")
		r.Len()
		roots[g] = r.U32()
		all = append(all, g)
	}
	g, other := all[0], all[1]
	var held []uint32
	for range 8 {
		held = append(held, g.open(roots[g], "f", openCreate, flagWrite))
	}
	for _, g := range all {
		open := g.call(fsys, "[method]descriptor.open-at", u32(roots[g]), u32(0), str("f"), u32(0), u32(flagRead))
		failed(t, open, caseOfErrno(unix.EDQUOT))
		failed(t, g.call(fsys, "[method]descriptor.read-directory", u32(roots[g])), caseOfErrno(unix.EDQUOT))
	}
	failed(t, g.call(fsys, "[method]descriptor.open-at", u32(roots[g]), u32(0), str("none"), u32(0), u32(flagRead)), caseOfErrno(unix.EDQUOT))
	g.Drop(held[0])
	failed(t, other.call(fsys, "[method]descriptor.open-at", u32(roots[other]), u32(0), str("none"), u32(0), u32(flagRead)),
		caseOfErrno(unix.ENOENT))
	other.open(roots[other], "f", 0, flagRead)
	if !g.Hold(600) || other.Hold(600) || !other.Hold(400) {
		t.Error("of a quota of 1000 bytes, 600 and 400 must be granted, and 600 more refused")
	}
	g.Close()
	other.Close()
	if files.used != 0 || bytes.used != 0 {
		t.Errorf("%d files and %d bytes are held at the end, want 0", files.used, bytes.used)
	}
}

// TestTrailingSlashes: a path with a slash at its end means a directory, as on Linux.
func TestTrailingSlashes(t *testing.T) {
	g, _, root := preopened(t, false)
	at := func(name, path string) *wit.Reader {
		return g.call(fsys, "[method]descriptor."+name, u32(root), str(path))
	}
	ok(t, at("create-directory-at", "d/"))
	g.open(root, "d/", 0, flagRead)
	ok(t, g.call(fsys, "[method]descriptor.stat-at", u32(root), u32(0), str("d/")))
	ok(t, g.call(fsys, "[method]descriptor.rename-at", u32(root), str("d/"), u32(root), str("e/")))
	failed(t, at("unlink-file-at", "e/"), caseOfErrno(unix.EISDIR))
	ok(t, at("remove-directory-at", "e//"))
	g.open(root, "f", openCreate, flagWrite)
	failed(t, g.call(fsys, "[method]descriptor.stat-at", u32(root), u32(0), str("f/")), caseOfErrno(unix.ENOTDIR))
	failed(t, g.call(fsys, "[method]descriptor.open-at", u32(root), u32(0), str("f/"), u32(0), u32(flagRead)), caseOfErrno(unix.ENOTDIR))
	failed(t, g.call(fsys, "[method]descriptor.open-at", u32(root), u32(0), str("g/"), u32(openCreate), u32(flagWrite)),
		caseOfErrno(unix.ENOENT))
	failed(t, at("remove-directory-at", "f/"), caseOfErrno(unix.ENOTDIR))
	failed(t, at("unlink-file-at", "f/"), caseOfErrno(unix.ENOTDIR))
	ok(t, at("unlink-file-at", "f"))
}
