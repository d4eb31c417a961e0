package engine

import (
	"context"
	"runtime/cgo"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// sleeper returns a component whose cabi_realloc sleeps for 300 ms in preview 1. The component's own preview 1 does
// nothing, but the core path uses ours.
func sleeper(sig signature, params int) []byte {
	const poll = "poll_oneoff"
	var nap bin
	nap.i32(16).i32(1).u8(0x36, 2, 0)         // the monotonic clock,
	nap.i32(24).i32(300000000).u8(0x36, 2, 0) // in 300 ms
	nap.i32(0).i32(64).i32(1).i32(128).u8(0x10, 0, 0x1a).i32(1024)
	main := coreMod{
		imports: []coreFn{{module: preview1, name: poll, params: 4, results: 1}},
		funcs:   []coreFn{{name: "f", params: params, results: 1, body: *new(bin).i32(7)}},
		realloc: nap,
	}
	other := coreMod{funcs: []coreFn{{name: poll, params: 4, results: 1, body: *new(bin).i32(0)}}}
	c := newComp()
	for _, m := range []coreMod{main, other} {
		c.out.u8(1)
		c.out.sized(m.bytes())
	}
	c.coreInstance(new(bin).u8(0).u32(1).u32(0))
	c.coreInstance(new(bin).u8(0).u32(0).u32(1).str(preview1).u8(0x12).u32(0))
	memory, realloc, f := c.alias(1, "memory", 2), c.alias(1, "cabi_realloc", 0), c.alias(1, "f", 0)
	t := c.funcType(sig.params, sig.result)
	var canon, export bin
	canon.u8(0, 0).u32(f).u32(3).u8(0, 3).u32(memory).u8(4).u32(realloc).u32(t)
	c.out.section(8, 1, canon)
	export.u8(0).str("f").u8(1).u32(c.funcs).u8(0)
	c.out.section(11, 1, export)
	return c.out
}

// TestArgumentsOfALeftGuest: a guest that was abandoned while its arguments were being lowered wakes up after its
// caller has overwritten their memory with unchecked bytes.
func TestArgumentsOfALeftGuest(t *testing.T) {
	sig := signature{params: []*wit.Type{tStr, {Kind: wit.Option, Elem: tU32}}, result: tU32}
	c := guest(t, testEngine(t), sleeper(sig, 4), Host{})
	f, err := c.Func(Signature{Name: "f", Params: sig.params, Result: sig.result})
	if err != nil {
		t.Fatal(err)
	}
	account := NewAccount(0)
	i := instance(t, c, InstanceOptions{
		Path: PathCore, Account: account, Preopens: []Preopen{{Path: t.TempDir(), Guest: "/"}},
	})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	args := wit.AppendU32(wit.AppendOption(wit.AppendString(nil, "hello"), true), 1)
	if _, err := i.Call(ctx, f, args, nil); err == nil || i.Alive() {
		t.Fatalf("the guest was not abandoned: %v", err)
	}
	for k := range args {
		args[k] = 0x7f
	}
	i.Close()
	awaitRelease(t, account)
}

// awaitRelease waits until the account has no instances: a guest that was abandoned is released when it wakes up, and on a
// busy machine, a killed one can be abandoned.
func awaitRelease(t *testing.T, account *Account) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); account.Instances() > 0; time.Sleep(time.Millisecond) { // pacing of a poll
		if time.Now().After(end) {
			t.Fatalf("%d instances were not released", account.Instances())
		}
	}
}

// TestWriteAfterTheEnd: wasmtime's WASI writes in the background, possibly after the instance is released.
func TestWriteAfterTheEnd(t *testing.T) {
	i := instance(t, theGuest(t), InstanceOptions{})
	h := i.handle
	i.Close()
	if n := write(h, 1, []byte("too late")); n != 8 {
		t.Errorf("write after Close = %d, want 8 (discarded)", n)
	}
	if n := write(cgo.Handle(1<<40), 2, nil); n != 0 {
		t.Errorf("write for an unknown handle = %d, want 0", n)
	}
}

// TestPanicsOfTheHost: a panic of a writer does not end the process.
func TestPanicsOfTheHost(t *testing.T) {
	i := instance(t, theGuest(t), InstanceOptions{Stdout: panics{}})
	if n := write(i.handle, 1, []byte("x")); n >= 0 {
		t.Errorf("write to a writer that panics = %d, want an error", n)
	}
}

type panics struct{}

func (panics) Write([]byte) (int, error) { panic("as requested") }

// TestManyMemories: the memory limit applies to all memories of a component together, however often it instantiates its
// modules.
func TestManyMemories(t *testing.T) {
	sig := signature{params: []*wit.Type{tU32}, result: tU32}
	grower := coreMod{funcs: []coreFn{{name: "f", params: 1, results: 1, body: []byte{0x20, 0, 0x40, 0}}}}
	code := func(modules, times int) (*Code, *Func) {
		c := newComp()
		for range modules {
			c.out.u8(1)
			c.out.sized(grower.bytes())
		}
		for k := range times {
			c.coreInstance(new(bin).u8(0).u32(k % modules).u32(0))
		}
		f := c.alias(0, "f", 0)
		typ := c.funcType(sig.params, sig.result)
		var canon, export bin
		canon.u8(0, 0).u32(f).u32(0).u32(typ)
		c.out.section(8, 1, canon)
		export.u8(0).str("f").u8(1).u32(c.funcs).u8(0)
		c.out.section(11, 1, export)
		made := guest(t, testEngine(t), c.out, Host{})
		fn, err := made.Func(Signature{Name: "f", Params: sig.params, Result: sig.result})
		if err != nil {
			t.Fatal(err)
		}
		return made, fn
	}
	o := InstanceOptions{Path: PathComponent, MaxMemory: 16 << 20}
	many, _ := code(1, 3)
	if _, err := many.Instantiate(t.Context(), o); err == nil {
		t.Error("Instantiate accepted a module with a memory instantiated three times")
	}
	two, f := code(2, 2)
	i := instance(t, two, o)
	for pages, want := range map[uint32]uint32{130: 1<<32 - 1, 126: 2} {
		if out, err := i.Call(t.Context(), f, u32s(pages), nil); err != nil || string(out) != string(u32s(want)) {
			t.Errorf("growing by %d pages, with 128 for each of two memories = %x, %v; want %x", pages, out, err, u32s(want))
		}
	}
}

// TestEndlessVectors: a call of preview 1 with so many vectors that it would run for very long, where it cannot be
// killed.
func TestEndlessVectors(t *testing.T) {
	for name, call := range map[string]bin{
		"fd_write":    *new(bin).i32(1).i32(0).i32(4096).i32(8),
		"poll_oneoff": *new(bin).i32(0).i32(0).i32(2000).i32(8),
	} {
		var start bin
		start.raw(call)
		start.u8(0x10, 0, 0x10, 1)
		m := coreMod{
			imports: []coreFn{{module: preview1, name: name, params: 4, results: 1}, {module: preview1, name: "proc_exit", params: 1}},
			funcs:   []coreFn{{name: "_start", body: start}},
			pages:   64,
		}
		i := instance(t, guest(t, testEngine(t), m.bytes(), Host{}), InstanceOptions{})
		if code, err := i.Run(t.Context()); code != 28 || err != nil {
			t.Errorf("%s: Run = %d, %v; want 28 (EINVAL)", name, code, err)
		}
	}
}
