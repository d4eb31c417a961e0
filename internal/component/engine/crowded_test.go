package engine

import (
	"fmt"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// crowded is a server with so many of each thing beside what it needs. It also exports a function that takes a vector.
type crowded struct{ types, functions, tables, globals, exports, elements, items, segments int }

func (c crowded) bytes() []byte {
	var types, decls, tables, memory, globals, exports, elements, codes, data bin
	types.u8(0x60, 1, 0x7f, 1, 0x7f).u8(0x60, 4, 0x7f, 0x7f, 0x7f, 0x7f, 1, 0x7f).u8(0x60, 0, 0).u8(0x60, 1, 0x7b, 0)
	for k := range c.types { // of different types
		types.u8(0x60).u32(k%100 + 1)
		for range k%100 + 1 {
			types.u8(0x7f)
		}
		types.u8(0)
	}
	decls.u8(0, 1, 3)
	codes.u8(4, 0, 0x20, 0, 0x0b).u8(4, 0, 0x41, 0, 0x0b).u8(2, 0, 0x0b)
	exports.str(rawHandler+".0#handle").u8(0, 0).str("cabi_realloc").u8(0, 1).str("memory").u8(2, 0).str("vector").u8(0, 2)
	for range c.functions {
		decls.u8(2)
		codes.u8(2, 0, 0x0b)
	}
	for range c.tables {
		tables.u8(0x70, 0, 0)
	}
	memory.u8(0, 2)
	for range c.globals {
		globals.u8(0x7e, 1, 0x42, 0, 0x0b)
	}
	for k := range c.exports {
		exports.str(fmt.Sprint(k)).u8(0).u32(min(k, 1))
	}
	for range c.elements {
		elements.u8(1, 0).u32(max(c.items, 1)).raw(make([]byte, max(c.items, 1))) // passive, all of one function
	}
	for range c.segments {
		data.u8(1, 1, 'x') // passive
	}
	out := bin(wasmbin.ModuleHeader)
	out.section(1, 4+c.types, types)
	out.section(3, 3+c.functions, decls)
	if c.tables > 0 {
		out.section(4, c.tables, tables)
	}
	out.section(5, 1, memory)
	if c.globals > 0 {
		out.section(6, c.globals, globals)
	}
	out.section(7, 4+c.exports, exports)
	if c.elements > 0 {
		out.section(9, c.elements, elements)
	}
	if c.segments > 0 {
		out.section(12, c.segments, nil)
	}
	out.section(10, 3+c.functions, codes)
	if c.segments > 0 {
		out.section(11, c.segments, data)
	}
	return out
}

// TestCrowdedModules: a module with as much as is allowed of one thing, or of everything, runs, and what its instance takes is
// charged; with more it is refused.
func TestCrowdedModules(t *testing.T) {
	const functions, globals = maxInstanceSize/32 - 3, (maxInstanceSize - 3*32) / 16
	for name, c := range map[string]struct {
		crowded
		charged uint64 // at least
		refused string
	}{
		"few":                {},
		"types":              {crowded: crowded{types: 2000}},
		"many functions":     {crowded: crowded{functions: 20_000}, charged: 32 * 20_000},
		"too many functions": {crowded: crowded{functions: functions + 1}, refused: "in each instance"},
		"tables":             {crowded: crowded{tables: maxTables}},
		"too many tables":    {crowded: crowded{tables: maxTables + 1}, refused: "tables"},
		"globals":            {crowded: crowded{globals: globals}, charged: 16 * globals},
		"too many globals":   {crowded: crowded{globals: globals + 1}, refused: "in each instance"},
		"exports":            {crowded: crowded{exports: 90_000}},
		"too many exports":   {crowded: crowded{exports: 999_000}, refused: "limit"},
		"elements":           {crowded: crowded{elements: 99_000}, charged: 16 * 99_000},
		"long elements":      {crowded: crowded{elements: 2, items: 100_000}, charged: 16 * 200_000},
		"too long elements":  {crowded: crowded{elements: 2, items: 300_000}, refused: "in each instance"},
		"too many elements":  {crowded: crowded{elements: 101_000}, refused: "limit"},
		"segments":           {crowded: crowded{segments: 99_000}, charged: 12 * 99_000},
		"too many segments":  {crowded: crowded{segments: 101_000}, refused: "too many"},
		"everything": {crowded: crowded{types: 500, functions: 5_000, tables: maxTables, globals: 100_000, exports: 50_000, elements: 50_000,
			segments: 50_000},
			charged: 32*5_000 + 16*100_000 + 16*50_000 + 12*50_000},
	} {
		t.Run(name, func(t *testing.T) {
			opts := rawOptions()
			e := testEngine(t)
			image, err := e.Compile(t.Context(), c.bytes(), opts)
			if c.refused != "" {
				if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), c.refused) {
					t.Errorf("Compile: error %v, want errdefs.ErrInvalidArgument with %q", err, c.refused)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			code, err := e.Load(image, opts.ModuleHost)
			if err != nil {
				t.Fatal(err)
			}
			defer code.Close()
			a := NewAccount(0)
			i := instance(t, code, InstanceOptions{Account: a})
			if held := a.Memory(); held+freeInstanceSize < 2*wasmbin.PageSize+c.charged {
				t.Errorf("Memory = %d, want at least %d for the instance", held, c.charged)
			}
			handled(t, code, i, 21, 21)
			i.Close()
			if held := a.Memory(); held != 0 {
				t.Errorf("Memory after Close = %d, want 0", held)
			}
		})
	}
}

// TestCrowdedPlan: each instance of a core module counts, also if a component makes several from the same module.
func TestCrowdedPlan(t *testing.T) {
	sig := signature{[]*wit.Type{tU32}, tU32}
	const functions = 20_000
	var decls, codes bin // a module without memory
	for range functions {
		decls.u8(0)
		codes.u8(2, 0, 0x0b)
	}
	crowd := bin(wasmbin.ModuleHeader)
	crowd.section(1, 1, []byte{0x60, 0, 0})
	crowd.section(3, functions, decls)
	var exports bin
	crowd.section(7, 1, *exports.str("x").u8(0, 0))
	crowd.section(10, functions, codes)
	for crowds, refused := range map[int]bool{4: false, 16: true} {
		c := newComp()
		m := coreMod{funcs: []coreFn{{name: "f", params: 1, results: 1, body: []byte{0x20, 0}}}}
		var args bin
		for k := range crowds { // the module needs each of them
			m.imports = append(m.imports, coreFn{module: fmt.Sprint(k), name: "x"})
			args.str(fmt.Sprint(k)).u8(0x12).u32(k)
		}
		for _, code := range [][]byte{m.bytes(), crowd} {
			c.out.u8(1)
			c.out.sized(code)
		}
		for range crowds {
			c.coreInstance(new(bin).u8(0, 1, 0))
		}
		var with bin
		with.u8(0, 0).u32(crowds).raw(args)
		c.coreInstance(&with)
		fn, typ := c.alias(crowds, "f", 0), c.funcType(sig.params, sig.result)
		var canon, export bin
		canon.u8(0, 0).u32(fn).u32(0).u32(typ)
		c.out.section(8, 1, canon)
		export.u8(0).str("f").u8(1).u32(c.funcs).u8(0)
		c.out.section(11, 1, export)

		e := testEngine(t)
		image, err := e.Compile(t.Context(), c.out, CompileOptions{plan: true})
		if refused {
			if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "in each instance") {
				t.Errorf("%d instances: error %v, want errdefs.ErrInvalidArgument", crowds, err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		code, err := e.Load(image, Host{})
		if err != nil {
			t.Fatal(err)
		}
		defer code.Close()
		a := NewAccount(0)
		instance(t, code, InstanceOptions{Account: a})
		if code.img.Plan == nil || a.Memory()+freeInstanceSize < uint64(crowds)*functions*32 {
			t.Errorf("plan %v: Memory of %d instances = %d, want at least %d", code.img.Plan, crowds, a.Memory(), crowds*functions*32)
		}
	}
}
