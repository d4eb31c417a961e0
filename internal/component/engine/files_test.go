package engine

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/test/until"
)

// TestFaultW7FilesAreCounted is row W7 for open files: a guest that opens files endlessly gets EMFILE at the limit of
// its pod's account, which other guests of the account share. Closing and the guest's end give everything back.
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
	printTo := func(ctx context.Context, out io.Writer, a *Account, args ...string) error {
		i := instance(t, c, InstanceOptions{Args: append([]string{"prog"}, args...), Stdout: out, Preopens: dirs, Account: a})
		defer i.Close()
		code, err := i.Run(ctx)
		if err == nil && code != 0 {
			err = fmt.Errorf("code %d", code)
		}
		return err
	}
	run := func(ctx context.Context, a *Account, args ...string) (string, error) {
		var out bytes.Buffer
		err := printTo(ctx, &out, a, args...)
		return out.String(), err
	}
	if _, err := run(t.Context(), a, "hold", "/data/f", "1", "0"); err != nil { // opens what wasmtime keeps for all guests
		t.Fatal(err)
	}
	before := openFiles(t)
	for range 3 { // the directory counts as one file
		if out, err := run(t.Context(), a, "hold", "/data/f", "100000", "0"); err != nil || out != "39: No file descriptors available\n" {
			t.Errorf("hold: output %q, %v; want 39 files", out, err)
		}
		if a.Held(HeldFiles) != 0 || all.Held(HeldFiles) != 0 {
			t.Fatalf("Held(HeldFiles) after the end = %d, %d of all; want 0", a.Held(HeldFiles), all.Held(HeldFiles))
		}
	}
	// A guest that is killed while it sleeps gives back too. Closed files are given back immediately.
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	out, guest := io.Pipe()
	go func() { done <- printTo(ctx, guest, a, "toss", "/data/f", "100000", "600") }()
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "39: No file descriptors available\n" {
		t.Fatalf("toss: output %q, %v; want 39 files", line, err)
	}
	until.Holds(t, "the guest holds its directory and a file", func() bool { return a.Held(HeldFiles) == 2 })
	other := NewAccount(0)
	other.Within(all)
	if out, err := run(t.Context(), other, "hold", "/data/f", "100000", "0"); err != nil || out != "57: No file descriptors available\n" {
		t.Errorf("hold within the worker's limit: output %q, %v; want 57 files", out, err)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if after := openFiles(t); all.Held(HeldFiles) != 0 || after > before {
		t.Errorf("after the kill %d files are held, want 0; %d are open, want at most %d", all.Held(HeldFiles), after, before)
	}
	// A preopened directory counts, too: at the limit there is no room for an instance.
	a.Bound(HeldFiles, 0)
	all.Bound(HeldFiles, 1)
	_, err := c.Instantiate(t.Context(), InstanceOptions{Account: a, Preopens: append(dirs, Preopen{Path: dir, Guest: "/other"})})
	if !errors.Is(err, ErrHandles) || !errdefs.IsResourceExhausted(err) || all.Held(HeldFiles) != 0 {
		t.Errorf("Instantiate beyond the limit: error %v, want ErrHandles; %d files are held, want 0", err, all.Held(HeldFiles))
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

// TestTrailingSlashes: a path with a slash at its end means a directory, as on Linux.
func TestTrailingSlashes(t *testing.T) {
	var out bytes.Buffer
	i := instance(t, command(t),
		InstanceOptions{Args: []string{"prog", "slashes"}, Stdout: &out, Preopens: []Preopen{{Path: t.TempDir(), Guest: "/data"}}})
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
				t.Errorf("got line %q, want %q", line, w[n])
			}
		}
	}
}

// TestFaultW7Pipes is row W7 for threads: opening a pipe without another end would block one of wasmtime's threads
// forever, so only files and directories can be opened.
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
		i := instance(t, command(t),
			InstanceOptions{Args: append([]string{"prog"}, args...), Preopens: []Preopen{{Path: dir, Guest: "/data"}}, Account: a})
		code, err := i.Run(ctx)
		cancel()
		if code != 9 || err != nil {
			t.Errorf("%v: Run = %d, %v; want 9", args, code, err)
		}
		i.Close()
		if a.Held(HeldFiles) != 0 || a.Instances() != 0 {
			t.Errorf("%v: %d files and %d instances were not released", args, a.Held(HeldFiles), a.Instances())
		}
	}
}

// TestFaultW7Listings is row W7 for bytes: wasmtime reads a whole directory for each call that lists part of it. That
// memory counts during the call, so that guests with huge directories cannot exhaust the worker's memory.
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
			t.Errorf("ls with a limit of %d bytes: output %q, want %q; Run = %d, %v", most, out.String(), want, code, err)
		}
		if a.Held(HeldBytes) != 0 {
			t.Errorf("Held(HeldBytes) after the end = %d, want 0", a.Held(HeldBytes))
		}
	}
}

// TestNamesThatAreNotUTF8: WASI has no form for them, so a listing leaves them out and a line in the log counts them. The
// other entries are listed, in directories that are preopened and that the guest opens, with libraries of C and Go.
func TestNamesThatAreNotUTF8(t *testing.T) {
	const files = 300 // several buffers of both libraries
	root := t.TempDir()
	dir := filepath.Join(root, "below")
	var names strings.Builder
	for n := range files {
		name := fmt.Sprintf("ä file with a name of some length %03d", n)
		if err := errors.Join(os.MkdirAll(dir, 0o700), os.WriteFile(filepath.Join(dir, name), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		names.WriteString(name + "\n")
	}
	golang, err := os.ReadFile("../../../examples/wasm/command-go/command-go.wasm")
	if err != nil {
		t.Fatal(err)
	}
	codes := map[string]*Code{"C": command(t), "Go": guest(t, testEngine(t), golang, Host{})}
	lists := map[string]string{"C": fmt.Sprintf("%d: ok\n", files+2), "Go": names.String()}
	check := func(logged string) {
		t.Helper()
		for library, c := range codes {
			for guest, host := range map[string]string{"/data": root, "/data/below": dir} {
				var out, log bytes.Buffer
				a := NewAccount(0)
				i := instance(t, c, InstanceOptions{
					Args: []string{"prog", "ls", "/data/below"}, Stdout: &out, Stderr: &log, Account: a,
					Preopens: []Preopen{{Path: host, Guest: guest, ReadOnly: true}},
				})
				if code, err := i.Run(t.Context()); err != nil || code != 0 || out.String() != lists[library] || log.String() != logged {
					t.Errorf("%s, preopened %s: Run = %d, %v; output %.200q, log %q", library, guest, code, err, out.String(), log.String())
				}
				i.Close()
				if a.Held(HeldBytes) != 0 {
					t.Errorf("Held(HeldBytes) after the end = %d, want 0", a.Held(HeldBytes))
				}
			}
		}
	}
	check("")
	before := openFiles(t)
	for _, bad := range []string{"\xff", "later \xc3"} {
		if err := os.WriteFile(filepath.Join(dir, bad), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	check("level=WARN msg=\"a directory has names that are not UTF-8: 2 of its entries are left out\" context=wasi_snapshot_preview1\n")
	if after := openFiles(t); after > before {
		t.Errorf("%d files are open, want %d", after, before)
	}
}
