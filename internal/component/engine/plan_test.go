package engine

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// callOf returns the body of a function that calls the imported function with three constants, and returns 1.
func callOf(a, b, c int32) bin { return *new(bin).i32(a).i32(b).i32(c).u8(0x10, 0).i32(1) }

// TestHostileLowering: a guest with several core modules passes bad pointers to the host, or has a bad allocator. Its call
// ends, the host never sees the values, and other instances go on.
func TestHostileLowering(t *testing.T) {
	sig := signature{params: []*wit.Type{tStr}, result: &wit.Type{Kind: wit.List, Elem: tU32}} // ask(address, length, result)
	whole := func(f bin, realloc bin) []byte {
		m := coreMod{
			imports: []coreFn{{module: rootModule, name: "ask", params: 3}},
			funcs:   []coreFn{{name: "f", params: 1, results: 1, body: f}},
			realloc: realloc,
		}
		return wrapped(m, map[string]signature{"f": {[]*wit.Type{tU32}, tU32}}, "ask", sig)
	}
	const answered = 1 // the host has been called, and its result does no harm
	good := callOf(0, 1, 16)
	for name, c := range map[string]struct {
		wasm  []byte
		calls int
	}{
		"a good guest":                        {whole(good, nil), answered},
		"a string out of bounds":              {whole(callOf(-65536, 10, 16), nil), 0},
		"a length that overflows":             {whole(callOf(8, -1, 16), nil), 0},
		"an address and length that overflow": {whole(callOf(-8, 16, 16), nil), 0},
		"a result out of bounds":              {whole(callOf(0, 1, -4), nil), answered},
		"a result that is not aligned":        {whole(callOf(0, 1, 17), nil), answered},
		"an allocation out of bounds":         {whole(good, *new(bin).i32(-16)), answered},
		"an allocation at the end":            {whole(good, *new(bin).i32(2*65536 - 4)), answered},
		"an allocation that is not aligned":   {whole(good, *new(bin).i32(65)), answered},
		"an allocator that traps":             {whole(good, bin{0x00}), answered},
		"an allocator that calls the host":    {whole(good, callOf(0, 0, 16)), answered},
		"a string that is not UTF-8":          {whole(append(*new(bin).i32(0).i32(255).u8(0x3a, 0, 0), good...), nil), 0},
	} {
		t.Run(name, func(t *testing.T) {
			calls := 0
			host := Host{Funcs: []HostFunc{{Name: "ask", Params: sig.params, Result: sig.result,
				Call: func(*HostCall, []byte) ([]byte, error) {
					calls++
					return append(u32s(2), u32s(3, 4)...), nil
				}}}}
			for _, options := range []CompileOptions{{plan: true}, {}, {ComponentPath: true}} {
				calls = 0
				code := guestBy(t, testEngine(t), c.wasm, host, options)
				if (code.img.Plan != nil) != options.plan {
					t.Fatalf("plan %v, want %v", code.img.Plan, options.plan)
				}
				f, err := code.Func(Signature{Name: "f", Params: []*wit.Type{tU32}, Result: tU32})
				if err != nil {
					t.Fatal(err)
				}
				i := instance(t, code, InstanceOptions{})
				out, err := i.Call(t.Context(), f, u32s(0), nil)
				var trap *Trap
				if name == "a good guest" {
					if err != nil || string(out) != string(u32s(1)) || calls != c.calls {
						t.Errorf("%+v: f = %x, %v after %d calls of the host", options, out, err, calls)
					}
				} else if !errors.As(err, &trap) && !errors.Is(err, ErrMemory) || calls != c.calls || i.Alive() {
					t.Errorf("%+v: error %v, %d calls of the host, Alive() = %v; want a trap, %d, false", options, err, calls, i.Alive(), c.calls)
				}
			}
			i := instance(t, theGuest(t), InstanceOptions{Path: PathCore})
			if _, err := i.Call(t.Context(), bound(t, "count"), nil, nil); err != nil {
				t.Errorf("Call of another instance: %v", err)
			}
		})
	}
}

// TestWhyComponentPath: a component whose core modules the engine cannot connect takes the component path, and says why.
func TestWhyComponentPath(t *testing.T) {
	sig := signature{[]*wit.Type{tU32}, tU32}
	grower := coreMod{funcs: []coreFn{{name: "f", params: 1, results: 1, body: []byte{0x20, 0, 0x40, 0}}}}
	tables := bin(wasmbin.ModuleHeader)
	tables.section(1, 1, []byte{0x60, 1, 0x7f, 1, 0x7f})
	tables.section(3, 1, []byte{0})
	tables.section(4, 5, bytes.Repeat([]byte{0x70, 0, 1}, 5))
	tables.section(7, 1, *new(bin).str("f").u8(0, 0))
	tables.section(10, 1, []byte{7, 0, 0x20, 0, 0x41, 1, 0x6a, 0x0b})
	twice := func(module []byte) []byte { // a component of two instances, which exports f of both as f and g
		c := newComp()
		for k := range 2 {
			c.out.u8(1)
			c.out.sized(module)
			c.coreInstance(new(bin).u8(0).u32(k).u32(0))
		}
		for k, name := range []string{"f", "g"} {
			f, typ := c.alias(k, "f", 0), c.funcType(sig.params, sig.result)
			var canon, export bin
			canon.u8(0, 0).u32(f).u32(0).u32(typ)
			c.out.section(8, 1, canon)
			export.u8(0).str(name).u8(1).u32(c.funcs).u8(0)
			c.out.section(11, 1, export)
			c.funcs += 2
		}
		return c.out
	}
	for why, wasm := range map[string][]byte{"its core modules have 2 memories": grower.bytes(), "its core modules have 10 tables": tables} {
		c := guestBy(t, testEngine(t), twice(wasm), Host{}, CompileOptions{})
		if c.Path() != PathComponent || !strings.Contains(c.WhyComponent(), why) {
			t.Errorf("Path() = %v, WhyComponent() = %q; want %v, %q", c.Path(), c.WhyComponent(), PathComponent, why)
		}
		f, err := c.Func(Signature{Name: "g", Params: sig.params, Result: sig.result})
		if err != nil {
			t.Fatal(err)
		}
		if out, err := instance(t, c, InstanceOptions{}).Call(t.Context(), f, u32s(1), nil); err != nil || string(out) != string(u32s(2)) {
			t.Errorf("g(1) = %x, %v; want 2", out, err)
		}
	}
}

// TestSecondImport runs a command whose core module imports a function twice, as Go's linker does. wit-component renames
// the second import, so that the module alone has an import that preview 1 does not have.
func TestSecondImport(t *testing.T) {
	for _, options := range []CompileOptions{{}, {ComponentPath: true}} {
		code := guestBy(t, testEngine(t), read(t, "twice.wasm"), withWASI(Host{}), options)
		if (code.img.Plan != nil) == options.ComponentPath || code.World() != WorldCommand {
			t.Fatalf("%+v: plan %v, world %s (%s)", options, code.img.Plan, code.World(), code.WhyComponent())
		}
		var out bytes.Buffer
		status, err := instance(t, code, InstanceOptions{Stdout: &out}).Run(t.Context())
		if status != 0 || err != nil || out.String() != "twice\ntwice\n" {
			t.Errorf("%+v: Run = %d, %v; output %q", options, status, err, out.String())
		}
	}
}

// TestPlanWithoutMemory: C memory runs out at each allocation while the instances of several core modules are made.
func TestPlanWithoutMemory(t *testing.T) {
	byPlan = true
	defer func() { byPlan = false }()
	c := theGuest(t)
	defer failAllocsAfter(-1)
	for n := range int64(32) {
		failAllocsAfter(n)
		i, err := c.Instantiate(t.Context(), InstanceOptions{Host: &things{}})
		if failAllocsAfter(-1); err == nil {
			i.Close()
			return
		}
		if !errors.Is(err, ErrStarved) {
			t.Errorf("without memory after %d allocations: %v, want ErrStarved", n, err)
		}
	}
	t.Error("Instantiate never succeeded")
}

// TestParts: a component of several core modules that uses everything that has an index gives the same results as one module
// as by the component path, which connects the modules themselves.
func TestParts(t *testing.T) {
	if quickTests {
		t.Skip("TRIPOD_TEST_QUICK is set, and Winch has no tail calls")
	}
	for file, cases := range map[string]uint32{"parts.wasm": 10, "order.wasm": 1} {
		codes := []*Code{
			guestBy(t, testEngine(t), read(t, file), Host{}, CompileOptions{}),
			guestBy(t, testEngine(t), read(t, file), Host{}, CompileOptions{ComponentPath: true}),
		}
		if codes[0].img.Plan == nil {
			t.Fatalf("%s is not planned: %s", file, codes[0].WhyComponent())
		}
		for n := range cases {
			results := [2]string{callParts(t, codes[0], n), callParts(t, codes[1], n)}
			if results[0] != results[1] || len(results[0]) < 8 {
				t.Errorf("%s, case %d: %s, want %s", file, n, results[0], results[1])
			}
		}
	}
}

// callParts calls the functions of two instances of a module, which share memory and a table.
func callParts(t *testing.T, c *Code, n uint32) string {
	t.Helper()
	i := instance(t, c, InstanceOptions{})
	var all []string
	for _, name := range []string{"run", "again", "run"} {
		f, err := c.Func(Signature{Name: name, Params: []*wit.Type{tU32}, Result: tU32})
		if errdefs.IsNotFound(err) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		out, err := i.Call(t.Context(), f, u32s(n), nil)
		if all = append(all, fmt.Sprintf("%x", out)); err != nil {
			return strings.Join(append(all, err.Error()), " ")
		}
	}
	return strings.Join(all, " ")
}
