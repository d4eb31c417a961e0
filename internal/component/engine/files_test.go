package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// TestFaultW7FilesAreCounted is row W7 for open files: a guest that opens without end meets EMFILE at the bound of its
// pod's account, others of the account share it, and all is given back: by close, and by the guest's end.
func TestFaultW7FilesAreCounted(t *testing.T) {
	c, dir := command(t), t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	all, a := NewAccount(0), NewAccount(0)
	a.Within(all)
	all.Bound(HeldFiles, 60)
	a.Bound(HeldFiles, 40)
	dirs := []Preopen{{Path: dir, Guest: "/data"}}
	run := func(ctx context.Context, a *Account, args ...string) (string, error) {
		var out bytes.Buffer
		i := instance(t, c, InstanceOptions{Args: append([]string{"prog"}, args...), Stdout: &out, Preopens: dirs, Account: a})
		defer i.Close()
		code, err := i.Run(ctx)
		if err == nil && code != 0 {
			err = fmt.Errorf("code %d", code)
		}
		return out.String(), err
	}
	if _, err := run(t.Context(), a, "hold", "/data/f", "1", "0"); err != nil { // what the engine keeps for all
		t.Fatal(err)
	}
	before := openFiles(t)
	for range 3 { // one is the directory
		if out, err := run(t.Context(), a, "hold", "/data/f", "100000", "0"); err != nil || out != "39: No file descriptors available\n" {
			t.Errorf("%q, %v", out, err)
		}
		if a.Held(HeldFiles) != 0 || all.Held(HeldFiles) != 0 {
			t.Fatalf("%d files are held, %d by all", a.Held(HeldFiles), all.Held(HeldFiles))
		}
	}
	// A guest that sleeps and is killed gives back, too; what it closed is given back at once.
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		_, err := run(ctx, a, "toss", "/data/f", "100000", "600")
		done <- err
	}()
	for end := time.Now().Add(20 * time.Second); a.Held(HeldFiles) != 2; time.Sleep(time.Millisecond) { // pacing of a poll
		if time.Now().After(end) {
			t.Fatalf("%d files are held", a.Held(HeldFiles))
		}
	}
	other := NewAccount(0)
	other.Within(all)
	if out, err := run(t.Context(), other, "hold", "/data/f", "100000", "0"); err != nil || out != "57: No file descriptors available\n" {
		t.Errorf("what the worker's bound leaves: %q, %v", out, err)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if after := openFiles(t); all.Held(HeldFiles) != 0 || after > before {
		t.Errorf("%d files are held, %d open, before %d", all.Held(HeldFiles), after, before)
	}
	// A directory of its own is one of them: no room for it is no room for an instance.
	a.Bound(HeldFiles, 0)
	all.Bound(HeldFiles, 1)
	_, err := c.Instantiate(t.Context(), InstanceOptions{Account: a, Preopens: append(dirs, Preopen{Path: dir, Guest: "/other"})})
	if !errors.Is(err, ErrHandles) || !errdefs.IsResourceExhausted(err) || all.Held(HeldFiles) != 0 {
		t.Errorf("%v; %d held", err, all.Held(HeldFiles))
	}
}

func openFiles(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// TestTrailingSlashes: a path that ends with a slash means a directory, as it does on Linux.
func TestTrailingSlashes(t *testing.T) {
	var out bytes.Buffer
	i := instance(t, command(t), InstanceOptions{Args: []string{"prog", "slashes"}, Stdout: &out, Preopens: []Preopen{{Path: t.TempDir(), Guest: "/data"}}})
	if code, err := i.Run(t.Context()); err != nil || code != 0 {
		t.Fatal(code, err)
	}
	const want = `mkdir d/: ok
stat d/: ok
open d/: ok
rename d/ e/: ok
symlink e l: ok
stat l/: ok
unlink e/: Is a directory
rmdir e//: ok
create f: ok
create g/: Is a directory
stat f/: Not a directory
open f/: Not a directory
rmdir f/: Not a directory
rename f/ h: Not a directory
link f h/: No such file or directory
unlink f/: Not a directory
unlink f: ok
`
	if out.String() != want {
		for n, line := range strings.Split(out.String(), "\n") {
			if w := strings.Split(want, "\n"); n < len(w) && w[n] != line {
				t.Errorf("%s, not %s", line, w[n])
			}
		}
	}
}

// TestFaultW7Pipes is row W7 for threads: to open a pipe of which nobody has the other end would hold one of the engine's for
// ever, so that only files and directories are opened.
func TestFaultW7Pipes(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mkfifo(filepath.Join(dir, "pipe"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("pipe", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"read", "/data/pipe"}, {"read", "/data/link"}, {"write", "/data/pipe", "words"}} {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		a := NewAccount(0)
		i := instance(t, command(t), InstanceOptions{Args: append([]string{"prog"}, args...), Preopens: []Preopen{{Path: dir, Guest: "/data"}}, Account: a})
		code, err := i.Run(ctx)
		cancel()
		if code != 9 || err != nil {
			t.Errorf("%v: code %d, %v", args, code, err)
		}
		i.Close()
		if a.Held(HeldFiles) != 0 || a.Instances() != 0 {
			t.Errorf("%v: %d files, %d instances stay", args, a.Held(HeldFiles), a.Instances())
		}
	}
}

// TestFaultW7Listings is row W7 for bytes: the engine reads the whole of a directory for each call that lists some of it, which
// counts for that time, so that guests with huge directories cannot take the worker's memory.
func TestFaultW7Listings(t *testing.T) {
	const files = 2000
	dir := t.TempDir()
	for n := range files {
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("a file with a name of some length %d", n)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	info, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	for most, want := range map[int64]string{
		8 * info.Size(): fmt.Sprintf("%d: ok\n", files+2), 8*info.Size() - 1: "0: Out of memory\n",
	} {
		var out bytes.Buffer
		a := NewAccount(0)
		a.Bound(HeldBytes, most)
		i := instance(t, command(t), InstanceOptions{
			Args: []string{"prog", "ls", "/data"}, Stdout: &out, Preopens: []Preopen{{Path: dir, Guest: "/data"}}, Account: a,
		})
		if code, err := i.Run(t.Context()); err != nil || code != 0 || out.String() != want {
			t.Errorf("%d bytes: %q, not %q; code %d, %v", most, out.String(), want, code, err)
		}
		if a.Held(HeldBytes) != 0 {
			t.Errorf("%d bytes are held afterwards", a.Held(HeldBytes))
		}
	}
}
