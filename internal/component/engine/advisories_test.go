package engine

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// The tests of this file are row W9: an advisory about wasmtime can affect only the guest's own call, or a process that
// serves only its pod (docs/wasm-advisories.md).

// TestFaultW9UndefinedFlags: bits outside a flags type have no effect (CVE-2026-34943 ended the process).
func TestFaultW9UndefinedFlags(t *testing.T) {
	sig := signature{params: []*wit.Type{tU32}, result: tColours}
	m := coreMod{funcs: []coreFn{{name: "f", params: 1, results: 1, body: []byte{0x20, 0}}}}
	c := guest(t, testEngine(t), wrapped(m, map[string]signature{"f": sig}, "", signature{}), Host{})
	f, err := c.Func(Signature{Name: "f", Params: sig.params, Result: sig.result})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []Path{PathCore, PathComponent} {
		out, err := instance(t, c, InstanceOptions{Path: p}).Call(t.Context(), f, u32s(0xff), nil)
		if err != nil || !bytes.Equal(out, u32s(7)) {
			t.Errorf("Call with undefined flags on the %v path = %x, %v; want %x", p, out, err, u32s(7))
		}
	}
}

// TestFaultW9Proposals: advisories about shared memories, 64-bit memories and tables, garbage collection, exceptions
// and asynchronous components need these features, which no guest may use.
func TestFaultW9Proposals(t *testing.T) {
	module := func(section byte, entry ...byte) []byte {
		var b bin = bin(wasmbin.ModuleHeader)
		b.section(1, 1, []byte{0x60, 0, 0})
		if section == 1 {
			b = bin(wasmbin.ModuleHeader)
		}
		b.section(section, 1, entry)
		return b
	}
	component := func(section byte, entry ...byte) []byte {
		var b bin = bin(wasmbin.ComponentHeader)
		b.section(section, 1, entry)
		return b
	}
	for name, wasm := range map[string][]byte{
		"shared memory":        module(5, 3, 1, 1),
		"64-bit memory":        module(5, 4, 1),
		"64-bit table":         module(4, 0x70, 4, 1),
		"a struct":             module(1, 0x5f, 0),
		"a tag of exceptions":  module(13, 0, 0),
		"a set to wait for":    component(8, 0x1f),
		"an asynchronous task": component(8, 0x05),
	} {
		var err error
		if wasm[4] == wasmbin.ModuleHeader[4] && bytes.HasPrefix(wasm, []byte(wasmbin.ModuleHeader)) {
			// Compile it like a component's module: as a command it would be refused because it has no _start.
			err = testEngine(t).compileModule(t.Context(), wasm, wasmbin.Module{Code: wasm}, &image{})
		} else {
			_, err = testEngine(t).Compile(t.Context(), wasm, CompileOptions{})
		}
		if !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: error %v, want errdefs.ErrInvalidArgument", name, err)
		} else {
			t.Logf("%s: %v", name, err)
		}
	}
}

// TestFaultW9Files: CVE-2026-47261 (truncating files in a read-only directory), CVE-2026-58494 (links and renames out
// of a directory), GHSA-vqjp-4c8c-hfgg (trailing slashes lead outside), GHSA-3p27-qvp9-27qf (descriptors replaced by
// renumbering leak) and GHSA-j2g9-4prp-pf6h (times outside the clock's range).
func TestFaultW9Files(t *testing.T) {
	ro, rw, outside := t.TempDir(), t.TempDir(), t.TempDir()
	write := func(dir, name string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("as it was"), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	write(ro, "f")
	write(rw, "x")
	write(outside, "secret")
	for name, to := range map[string]string{"out": outside + "/", "up": "../" + filepath.Base(outside) + "/"} {
		if err := os.Symlink(to, filepath.Join(rw, name)); err != nil {
			t.Fatal(err)
		}
	}
	out := &untilMoments{done: make(chan struct{})}
	attacked, a := out.done, NewAccount(0)
	i := instance(t, command(t), InstanceOptions{
		Args: []string{"prog", "attack", "600"}, Stdout: out, Account: a,
		Preopens: []Preopen{{Path: ro, Guest: "/ro", ReadOnly: true}, {Path: rw, Guest: "/data"}},
	})
	done := make(chan error, 1)
	go func() {
		_, err := i.Run(t.Context())
		done <- err
	}()
	select {
	case <-attacked:
	case err := <-done:
		t.Fatalf("the guest ended early: %v: %s", err, out.String())
	case <-time.After(30 * time.Second):
		t.Fatal("the guest did not finish its attacks in 30 s")
	}
	if held := a.Held(HeldFiles); held != 4 { // two directories, and two files at the end
		t.Errorf("Held(HeldFiles) = %d, want 4", held)
	}
	open := 0
	entries, _ := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(to, rw+"/") {
			open++
		}
	}
	if open != 2 {
		t.Errorf("%d files are open after 1000 were renumbered, want 2", open)
	}
	i.Kill()
	if err := <-done; !errors.Is(err, ErrKilled) {
		t.Error(err)
	}
	for line := range strings.Lines(out.String()) {
		what, result, _ := strings.Cut(strings.TrimSpace(line), ": ")
		if (result == "ok") != (what == "renumber" || what == "moments") {
			t.Errorf("%s: %s", what, result)
		}
	}
	for _, path := range []string{filepath.Join(ro, "f"), filepath.Join(outside, "secret")} {
		if text, err := os.ReadFile(path); err != nil || string(text) != "as it was" {
			t.Errorf("%s contains %q, %v; want it unchanged", path, text, err)
		}
	}
	for dir, most := range map[string]int{ro: 1, outside: 1} {
		if list, err := os.ReadDir(dir); err != nil || len(list) != most {
			t.Errorf("%s contains %v, %v; want %d files", dir, list, err, most)
		}
	}
	if err := unix.Access(filepath.Join(rw, "stolen"), unix.F_OK); err == nil {
		t.Error("a file was moved in from outside")
	}
}

// untilMoments collects the guest's output and closes done at its last line, "moments".
type untilMoments struct {
	bytes.Buffer
	done chan struct{} // nil once closed
}

func (u *untilMoments) Write(p []byte) (int, error) {
	n, err := u.Buffer.Write(p)
	if bytes.Contains(u.Bytes(), []byte("moments: ")) && u.done != nil {
		close(u.done)
		u.done = nil
	}
	return n, err
}

// TestFaultW9Loads: instructions that wasmtime compiles to loads of more bytes than needed (CVE-2026-24116 and
// CVE-2026-34944), at the very end of the memory. A guard page follows, so they can only trap.
func TestFaultW9Loads(t *testing.T) {
	sig := signature{params: []*wit.Type{tU32}, result: tU32}
	const last = 2*wasmbin.PageSize - 8
	load := func(b *bin) *bin { return b.i32(last).u8(0x2b, 3, 0) } // f64.load
	var copysign, splat bin
	load(load(&copysign)).u8(0xa6, 0xbd, 0xa7)             // f64.copysign, reinterpreted, its lower half
	load(&splat).u8(0xfd, 0x14, 0xfd, 0x21, 1, 0xbd, 0xa7) // f64x2.splat, lane 1
	m := coreMod{funcs: []coreFn{{name: "copysign", params: 1, results: 1, body: copysign},
		{name: "splat", params: 1, results: 1, body: splat}}}
	c := guest(t, testEngine(t), wrapped(m, map[string]signature{"copysign": sig, "splat": sig}, "", signature{}), Host{})
	for _, name := range []string{"copysign", "splat"} {
		f, err := c.Func(Signature{Name: name, Params: sig.params, Result: sig.result})
		if err != nil {
			t.Fatal(err)
		}
		var trap *Trap
		out, err := instance(t, c, InstanceOptions{}).Call(t.Context(), f, u32s(0), nil)
		if err != nil && !errors.As(err, &trap) || err == nil && !bytes.Equal(out, u32s(0)) {
			t.Errorf("%s at the end of the memory = %x, %v; want a trap or %x", name, out, err, u32s(0))
		}
	}
}
