package guestbuild

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestBuiltOnce: of several callers that need an entry at once, one makes it, and a failure leaves nothing behind.
func TestBuiltOnce(t *testing.T) {
	c := cache(t.TempDir())
	failure := errors.New("failure")
	if _, err := c.get("guest", func(draft string) error {
		return errors.Join(os.WriteFile(draft, []byte("half"), 0o600), failure)
	}); !errors.Is(err, failure) {
		t.Errorf("failed build: error %v, want the build's", err)
	}
	if left, _ := filepath.Glob(string(c) + "/guest*"); len(left) != 0 {
		t.Errorf("a failed build left %v", left)
	}
	var made atomic.Int32
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			path, err := c.get("guest", func(draft string) error {
				made.Add(1)
				return os.WriteFile(draft, []byte("whole"), 0o600)
			})
			if err != nil {
				t.Error(err)
			} else if content, err := os.ReadFile(path); err != nil || string(content) != "whole" {
				t.Errorf("content %q, %v; want the whole one", content, err)
			}
		})
	}
	callers.Wait()
	if n := made.Load(); n != 1 {
		t.Errorf("made %d times, want once", n)
	}
}

// TestPruned: a build removes entries and drafts that were not used for long, and keeps those that were.
func TestPruned(t *testing.T) {
	c := cache(t.TempDir())
	write := func(draft string) error { return os.WriteFile(draft, nil, 0o600) }
	for _, key := range []string{"used", "unused", "killed.draft"} {
		path, err := c.get(key, write)
		if err != nil {
			t.Fatal(err)
		}
		long := time.Now().Add(-unused - time.Hour)
		if err := os.Chtimes(path, long, long); err != nil {
			t.Fatal(err)
		}
		if _, err := c.get("used", write); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.get("other", write); err != nil {
		t.Fatal(err)
	}
	left, err := filepath.Glob(string(c) + "/*")
	if err != nil || len(left) != 3 || filepath.Base(left[0]) != lockFile || filepath.Base(left[1]) != "other" ||
		filepath.Base(left[2]) != "used" {
		t.Errorf("left after the build: %v, %v; want the lock, other and used", left, err)
	}
}

// TestIdentity: what a program is built from has another identity once a source, a local module or an argument changes,
// and the same one elsewhere.
func TestIdentity(t *testing.T) {
	write := func(path, text string) {
		t.Helper()
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	identity := func(dir string, args ...string) string {
		t.Helper()
		key, err := identify(dir, args, func(args ...string) ([]byte, error) {
			c := exec.CommandContext(t.Context(), "go", args...)
			c.Dir = dir
			return c.Output()
		})
		if err != nil {
			t.Fatal(err)
		}
		return key
	}
	module := func() (dir, library string) {
		dir, library = t.TempDir(), t.TempDir()
		write(dir+"/go.mod", "module example.com/x\n\ngo 1.26\n\nrequire example.com/y v0.0.0\n\nreplace example.com/y => "+library+"\n")
		write(dir+"/main.go", "package main\n")
		write(library+"/go.mod", "module example.com/y\n")
		write(library+"/y.go", "package y\n")
		return dir, library
	}
	dir, library := module()
	first := identity(dir, "-a")
	if other, _ := module(); identity(other, "-a") != first {
		t.Error("the same module elsewhere has another identity")
	}
	write(library+"/y_test.go", "package y\n")
	if identity(dir, "-a") != first {
		t.Error("a test changes the identity")
	}
	seen := map[string]string{first: "the first"}
	for _, change := range []struct{ file, text, arg string }{
		{dir + "/main.go", "package main // changed\n", "-a"}, {library + "/y.go", "package y // changed\n", "-a"},
		{dir + "/more.go", "package main\n", "-a"},
		{dir + "/go.mod", "module example.com/x\n\ngo 1.25\n\nreplace example.com/y => " + library + "\n", "-a"},
		{dir + "/more.go", "package main\n", "-b"},
	} {
		write(change.file, change.text)
		key := identity(dir, change.arg)
		if before := seen[key]; before != "" {
			t.Errorf("after %s with %q: the identity of %s", change.file, change.arg, before)
		}
		seen[key] = change.file
	}
}
