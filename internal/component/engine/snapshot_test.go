package engine

import (
	"bytes"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/component/wit"
)

const prepareName = snapshotInterface + "#prepare"

// snapshotModule returns a server in a core module whose prepare runs a body that leaves the address of its result on the
// stack; at address 64 there is a result without error. Its handle adds its parameter to the word at address 32, where
// there is 5, and to global 1, and returns 1000 times the global plus the word. It imports twice(i32) -> i32, a
// constructor of a resource, and random_get.
func snapshotModule(prepare []byte) []byte {
	var handle, types, imports, decls, memory, table, globals, exports, elements, codes, data bin
	handle.i32(32).i32(32).u8(0x28, 2, 0, 0x20, 0, 0x6a, 0x36, 2, 0)                                    // [32] += p0
	handle.u8(0x23, 1, 0x20, 0, 0x6a, 0x24, 1, 0x23, 1).i32(1000).u8(0x6c).i32(32).u8(0x28, 2, 0, 0x6a) // g1 += p0; 1000 g1 + [32]
	types.u8(0x60, 1, 0x7f, 1, 0x7f, 0x60, 0, 1, 0x7f, 0x60, 4, 0x7f, 0x7f, 0x7f, 0x7f, 1, 0x7f, 0x60, 2, 0x7f, 0x7f, 1, 0x7f)
	const raw = "tripod:grpc/raw@0.1.0"
	imports.str(raw).str("twice").u8(0, 0).str(raw).str("[constructor]thing").u8(0, 0).str(preview1).str("random_get").u8(0, 3)
	decls.u8(0, 1, 2)
	table.u8(0x70, 1, 3, 10) // at least 3 functions, at most 10
	memory.u8(1, 2, 10)      // at least 2 pages, at most 10
	globals.u8(0x7f, 1).i32(4096).u8(0x0b, 0x7f, 1).i32(7).u8(0x0b, 0x7f, 0).i32(-1).u8(0x0b)
	exports.str(rawHandler+".0#handle").u8(0, 3).str(prepareName).u8(0, 4).str("cabi_realloc").u8(0, 5).str("memory").u8(2, 0)
	elements.u8(0).i32(0).u8(0x0b, 2, 0, 3) // functions 0 and 3
	for _, body := range [][]byte{handle, prepare, reallocBody()} {
		var code bin
		code.u8(1, 1, 0x7f).raw(body)
		code.u8(0x0b)
		codes.sized(code)
	}
	data.u8(0).i32(32).u8(0x0b, 1, 5, 1, 3, 1, 2, 3) // 5 at 32, and a passive segment
	out := bin(wasmbin.ModuleHeader)
	for _, s := range []struct {
		id, n   byte
		entries bin
	}{{1, 4, types}, {2, 3, imports}, {3, 3, decls}, {4, 1, table}, {5, 1, memory}, {6, 3, globals}, {7, 4, exports}, {9, 1, elements}} {
		out.section(s.id, int(s.n), s.entries)
	}
	out.u8(12, 1, 2) // two data segments
	out.section(10, 3, codes)
	out.section(11, 2, data)
	return out
}

func (b *bin) zeroResult() *bin { return b.i32(64) }

// snapshotOptions are those of guests of snapshotModule.
func snapshotOptions() CompileOptions {
	opts := rawOptions()
	opts.ModuleHost.Funcs = append(opts.ModuleHost.Funcs, HostFunc{
		Interface: "tripod:grpc/raw@0.1.0", Name: "[constructor]thing", Params: []*wit.Type{tU32}, Result: tOwn,
		Call: func(*HostCall, []byte) ([]byte, error) { return u32s(1), nil },
	})
	opts.ModuleHost.Resources = thingsHost().Resources
	return opts
}

// loaded compiles and loads a guest.
func loaded(t *testing.T, e *Engine, wasm []byte) *Code {
	t.Helper()
	opts := snapshotOptions()
	image, err := e.Compile(t.Context(), wasm, opts)
	if err != nil {
		t.Fatal(err)
	}
	c, err := e.Load(image, opts.ModuleHost)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// prepared compiles and loads a guest, and returns an instance after its prepare, whose result must be without error.
func prepared(t *testing.T, e *Engine, wasm []byte, o InstanceOptions) (*Code, *Instance) {
	t.Helper()
	c := loaded(t, e, wasm)
	if why := c.WhyNoSnapshot(); why != "" {
		t.Fatalf("no snapshot: %s", why)
	}
	f, err := c.Func(PrepareSignature())
	if err != nil {
		t.Fatal(err)
	}
	o.Capture = true
	i := instance(t, c, o)
	if out, err := i.Call(t.Context(), f, nil, nil); err != nil || !bytes.Equal(out, make([]byte, 8)) {
		t.Fatalf("prepare = %x, %v; want a result without error", out, err)
	}
	return c, i
}

func handled(t *testing.T, c *Code, i *Instance, arg, want uint32) {
	t.Helper()
	f, err := c.Func(rawOptions().ModuleExports[0])
	if err != nil {
		t.Fatal(err)
	}
	if out, err := i.Call(t.Context(), f, u32s(arg), nil); err != nil || !bytes.Equal(out, u32s(want)) {
		t.Fatalf("handle(%d) = %x, %v; want %d", arg, out, err, want)
	}
}

// TestSnapshot checks that instances begin in the state of a snapshot, with its memory, its size and its globals, and
// that they do not change it, in the pool and beside it.
func TestSnapshot(t *testing.T) {
	var prepare bin
	prepare.i32(32).i32(6).u8(0x36, 2, 0)                  // [32] = 6
	prepare.i32(9).u8(0x24, 1)                             // g1 = 9
	prepare.i32(3).u8(0x40, 0, 0x1a)                       // grow by 3 pages
	prepare.i32(4<<16).i32(-1).u8(0x36, 2, 0).zeroResult() // [4 pages] = -1
	plain, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	for name, e := range map[string]*Engine{"pool": testEngine(t), "plain": plain} {
		t.Run(name, func(t *testing.T) {
			c, first := prepared(t, e, snapshotModule(prepare), InstanceOptions{})
			s, err := first.Capture(0, false, 1<<20)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			if want := uint64(4<<16 + pageBytes); s.Size() != want || s.memory() != 5<<16 {
				t.Errorf("Size = %d, memory = %d; want %d, from the first page with data to the last, and 5 << 16", s.Size(), s.memory(), want)
			}
			handled(t, c, first, 1, 10*1000+7)
			for range 3 {
				i := instance(t, c, InstanceOptions{Snapshot: s})
				if got := i.Memory(); got != 5<<16 {
					t.Errorf("Memory = %d, want 5 pages", got)
				}
				handled(t, c, i, 2, 11*1000+8)
				handled(t, c, i, 2, 13*1000+10)
				i.Close()
			}
			handled(t, c, instance(t, c, InstanceOptions{}), 2, 9*1000+7) // without a snapshot
			if _, err := c.Instantiate(t.Context(), InstanceOptions{Snapshot: s, MaxMemory: 4 << 16}); !errdefs.IsResourceExhausted(err) {
				t.Errorf("beyond the limit: error %v; want ErrMemory", err)
			}
			old := instance(t, c, InstanceOptions{Snapshot: s})
			s.Close()
			handled(t, c, old, 2, 11*1000+8)
			handled(t, c, instance(t, c, InstanceOptions{Snapshot: s}), 2, 9*1000+7)
		})
	}
}

// TestSnapshotRefused checks that a state is refused that is more than memory and numbers, or that depends on what each
// instance must see for itself.
func TestSnapshotRefused(t *testing.T) {
	set := func(b *bin) *bin { return b.i32(1).i32(0).u8(0x25, 0).u8(0x26, 0) } // table[1] = table[0]
	for want, prepare := range map[string]*bin{
		"changed a table":       set(new(bin)).zeroResult(),
		"changed a table ":      new(bin).u8(0xd0, 0x70).i32(1).u8(0xfc, 15, 0, 0x1a).zeroResult(), // table.grow
		"holds resources":       new(bin).i32(1).u8(0x10, 1, 0x1a).zeroResult(),
		"calls the host before": new(bin).i32(1).u8(0x10, 0, 0x1a).zeroResult(),
		"random values":         new(bin).i32(128).i32(8).u8(0x10, 2, 0x1a).zeroResult(),
		"limit 4 KiB":           new(bin).i32(8<<10).i32(1).u8(0x36, 2, 0).zeroResult(),
	} {
		_, i := prepared(t, testEngine(t), snapshotModule(*prepare), InstanceOptions{Host: &things{}})
		_, err := i.Capture(0, false, pageBytes)
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), strings.TrimSpace(want)) {
			t.Errorf("error %v; want %q", err, want)
		}
		if !i.Alive() {
			t.Errorf("%s: the instance is dead", want)
		}
	}
	_, i := prepared(t, testEngine(t), snapshotModule(*new(bin).zeroResult()), InstanceOptions{})
	i.Kill()
	if _, err := i.Capture(0, false, 1<<20); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("of a dead instance: error %v; want ErrDead", err)
	}
}

// TestSnapshotOfWrongType checks that a prepare or a warm of another type is found when the guest is compiled.
func TestSnapshotOfWrongType(t *testing.T) {
	good := coreFn{name: prepareName, results: 1, body: *new(bin).zeroResult()}
	odd := coreFn{params: 1, results: 1, body: *new(bin).i32(7)}
	for _, funcs := range [][]coreFn{{named(odd, prepareName)}, {good, named(odd, warmInterface+"#warm")}} {
		m := rawModule(nil, funcs...)
		m.imports = []coreFn{{module: "tripod:grpc/raw@0.1.0", name: "twice", params: 1, results: 1}}
		if _, err := testEngine(t).Compile(t.Context(), m.bytes(), rawOptions()); err == nil || !strings.Contains(err.Error(), `has type "i>i"`) {
			t.Errorf("error %v; want one that names the type", err)
		}
	}
}

func named(f coreFn, name string) coreFn {
	f.name = name
	return f
}

// TestSnapshotBesidePool checks that instances with a detached memory take no place in the pool, and count as instances
// beside it.
func TestSnapshotBesidePool(t *testing.T) {
	e, err := New(Config{Instances: 1, Overflow: 2})
	if err != nil {
		t.Fatal(err)
	}
	c, first := prepared(t, e, snapshotModule(*new(bin).i32(9).u8(0x24, 1).zeroResult()), InstanceOptions{})
	s, err := first.Capture(0, false, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for range 2 {
		handled(t, c, instance(t, c, InstanceOptions{Snapshot: s}), 2, 11*1000+7)
	}
	if _, err := c.Instantiate(t.Context(), InstanceOptions{Snapshot: s}); !errdefs.IsResourceExhausted(err) {
		t.Errorf("the fourth instance: error %v; want ErrResourceExhausted", err)
	}
}
