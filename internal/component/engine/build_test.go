package engine

import (
	"encoding/binary"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// bin assembles WebAssembly by hand (https://webassembly.github.io/spec/core/binary,
// https://github.com/WebAssembly/component-model/blob/main/design/mvp/Binary.md).
type bin []byte

func (b *bin) u8(v ...byte) *bin { *b = append(*b, v...); return b }
func (b *bin) u32(v int) *bin    { *b = binary.AppendUvarint(*b, uint64(v)); return b }
func (b *bin) str(s string) *bin { b.u32(len(s)); *b = append(*b, s...); return b }
func (b *bin) raw(body []byte)   { *b = append(*b, body...) }
func (b *bin) sized(body []byte) { b.u32(len(body)); b.raw(body) }
func (b *bin) section(id byte, n int, entries []byte) {
	var body bin
	body.u32(n)
	body.raw(entries)
	b.u8(id)
	b.sized(body)
}

// i32 appends i32.const with a constant in signed LEB128.
func (b *bin) i32(v int32) *bin {
	b.u8(0x41)
	for {
		c := byte(v & 0x7f)
		v >>= 7
		if v == 0 && c&0x40 == 0 || v == -1 && c&0x40 != 0 {
			return b.u8(c)
		}
		b.u8(c | 0x80)
	}
}

// coreMod describes a core module: functions on i32 only, one memory, and a cabi_realloc that never frees.
type coreMod struct {
	imports []coreFn // these get the first indices
	funcs   []coreFn
	pages   int    // initial memory size
	realloc []byte // the body of another cabi_realloc
}

type coreFn struct {
	module, name    string // for defined functions, name is the name of the export
	params, results int
	body            []byte // without locals and the final end
}

// reallocBody is a cabi_realloc that bumps global 0 and grows the memory, or traps.
func reallocBody() []byte {
	var c bin
	c.u8(0x23, 0, 0x20, 2, 0x6a).i32(1).u8(0x6b).i32(0).u8(0x20, 2, 0x6b, 0x71, 0x22, 4) // l4 = align(g, p2)
	c.u8(0x20, 3, 0x6a, 0x24, 0)                                                         // g = l4 + p3
	c.u8(0x23, 0, 0x3f, 0).i32(16).u8(0x74, 0x4b, 0x04, 0x40)                            // if g > size<<16
	c.u8(0x23, 0, 0x3f, 0).i32(16).u8(0x74, 0x6b).i32(16).u8(0x76).i32(1).u8(0x6a)       // pages missing + 1
	c.u8(0x40, 0).i32(-1).u8(0x46, 0x04, 0x40, 0x00, 0x0b, 0x0b)                         // grow == -1: unreachable
	c.u8(0x20, 4)
	return c
}

func (m coreMod) bytes() []byte {
	body := m.realloc
	if body == nil {
		body = reallocBody()
	}
	funcs := append(m.funcs, coreFn{name: "cabi_realloc", params: 4, results: 1, body: body})
	var types, imports, decls, exports, codes bin
	for k, f := range append(m.imports, funcs...) {
		types.u8(0x60).u32(f.params)
		for range f.params {
			types.u8(0x7f)
		}
		types.u32(f.results)
		for range f.results {
			types.u8(0x7f)
		}
		if k < len(m.imports) {
			imports.str(f.module).str(f.name).u8(0).u32(k)
			continue
		}
		decls.u32(k)
		exports.str(f.name).u8(0).u32(k)
		var code bin
		code.u8(1, 1, 0x7f) // one local
		code.raw(f.body)
		code.u8(0x0b)
		codes.sized(code)
	}
	exports.str("memory").u8(2).u32(0)
	out := bin(wasmbin.ModuleHeader)
	out.section(1, len(m.imports)+len(funcs), types)
	out.section(2, len(m.imports), imports)
	out.section(3, len(funcs), decls)
	var memory, global bin
	memory.u8(0).u32(max(m.pages, 2))
	out.section(5, 1, memory)
	global.u8(0x7f, 1).i32(4096).u8(0x0b)
	out.section(6, 1, global)
	out.section(7, len(funcs)+1, exports)
	out.section(10, len(funcs), codes)
	return out
}

// comp builds a component, and counts its index spaces.
type comp struct {
	out                            bin
	types, coreFuncs, funcs, names int
	made                           map[*wit.Type]int
}

func newComp() *comp { return &comp{out: bin(wasmbin.ComponentHeader), made: make(map[*wit.Type]int)} }

func (c *comp) typ(def bin) int {
	c.out.section(7, 1, def)
	c.types++
	return c.types - 1
}

var primitives = map[wit.Kind]byte{
	wit.Bool: 0x7f, wit.S8: 0x7e, wit.U8: 0x7d, wit.S16: 0x7c, wit.U16: 0x7b, wit.S32: 0x7a, wit.U32: 0x79,
	wit.S64: 0x78, wit.U64: 0x77, wit.F32: 0x76, wit.F64: 0x75, wit.Char: 0x74, wit.String: 0x73,
}

// ref returns a reference to a type and defines the type if needed. Types of kinds that have names are given one
// immediately, because imported and exported functions may only use named ones.
func (c *comp) ref(t *wit.Type) []byte {
	if p, ok := primitives[t.Kind]; ok {
		return []byte{p}
	}
	if n, ok := c.made[t]; ok {
		return binary.AppendUvarint(nil, uint64(n))
	}
	n := c.typ(c.def(t))
	switch t.Kind {
	case wit.Record, wit.Variant, wit.Enum, wit.Flags:
		n = c.name(n)
	}
	c.made[t] = n
	return binary.AppendUvarint(nil, uint64(n))
}

// name imports a type under a name, equal to type n.
func (c *comp) name(n int) int {
	var i bin
	c.names++
	i.u8(0).str("t"+string(rune('a'+c.names/26%26))+string(rune('a'+c.names%26))).u8(3, 0).u32(n)
	c.out.section(10, 1, i)
	c.types++
	return c.types - 1
}

func (c *comp) def(t *wit.Type) (d bin) {
	optional := func(t *wit.Type) {
		if t == nil {
			d.u8(0)
			return
		}
		d.u8(1)
		d.raw(c.ref(t))
	}
	switch t.Kind {
	case wit.Record, wit.Tuple:
		d.u8(map[wit.Kind]byte{wit.Record: 0x72, wit.Tuple: 0x6f}[t.Kind]).u32(len(t.Fields))
		for _, f := range t.Fields {
			if t.Kind == wit.Record {
				d.str(f.Name)
			}
			d.raw(c.ref(f.Type))
		}
	case wit.Variant:
		d.u8(0x71).u32(len(t.Cases))
		for _, k := range t.Cases {
			d.str(k.Name)
			optional(k.Type)
			d.u8(0)
		}
	case wit.Enum, wit.Flags:
		d.u8(map[wit.Kind]byte{wit.Enum: 0x6d, wit.Flags: 0x6e}[t.Kind]).u32(len(t.Cases))
		for _, k := range t.Cases {
			d.str(k.Name)
		}
	case wit.List:
		d.u8(0x70)
		d.raw(c.ref(t.Elem))
	case wit.Option:
		d.u8(0x6b)
		d.raw(c.ref(t.Elem))
	case wit.Result:
		d.u8(0x6a)
		optional(t.Ok)
		optional(t.Err)
	}
	return d
}

// funcType defines a function's type.
func (c *comp) funcType(params []*wit.Type, result *wit.Type) int {
	var refs [][]byte
	for _, p := range params {
		refs = append(refs, c.ref(p))
	}
	var res []byte
	if result != nil {
		res = c.ref(result)
	}
	var d bin
	d.u8(0x40).u32(len(params))
	for k, r := range refs {
		d.str("p" + string(rune('a'+k)))
		d.raw(r)
	}
	if result != nil {
		d.u8(0)
		d.raw(res)
	} else {
		d.u8(1, 0)
	}
	return c.typ(d)
}

// importFunc imports a function at the top level.
func (c *comp) importFunc(name string, typ int) int {
	var i bin
	i.u8(0).str(name).u8(1).u32(typ)
	c.out.section(10, 1, i)
	c.funcs++
	return c.funcs - 1
}

// wrapped makes a component around a core module that exports functions. If imported is not "", the module imports one
// of that name and of type sig. Lowering needs the module's memory, and the module needs the lowered function. So, as
// in wit-component's output, a second module calls through a table, and a third one fills the table.
func wrapped(m coreMod, exports map[string]signature, imported string, sig signature) []byte {
	c := newComp()
	var fn int
	if imported != "" {
		fn = c.importFunc(imported, c.funcType(sig.params, sig.result))
	}
	c.out.u8(1)
	c.out.sized(m.bytes())
	main := 0
	if imported != "" {
		main = 2
		c.shim(m.imports[0])
	} else {
		c.coreInstance(new(bin).u8(0).u32(0).u32(0))
	}
	memory, realloc := c.alias(main, "memory", 2), c.alias(main, "cabi_realloc", 0)
	if imported != "" {
		c.fill(fn, memory, realloc)
	}
	for name, s := range exports {
		t := c.funcType(s.params, s.result)
		var canon, export bin
		f := c.alias(main, name, 0)
		canon.u8(0, 0).u32(f).u32(3).u8(0, 3).u32(memory).u8(4).u32(realloc).u32(t)
		c.out.section(8, 1, canon)
		export.u8(0).str(name).u8(1).u32(c.funcs).u8(0)
		c.out.section(11, 1, export)
		c.funcs += 2 // the lifted function, and the export
	}
	return c.out
}

func (c *comp) coreInstance(b *bin) { c.out.section(2, 1, *b) }

// shim makes instances 0 (a module that calls through its table), 1 (its function under the name that the guest
// imports) and 2 (the guest).
func (c *comp) shim(f coreFn) {
	shim := bin(wasmbin.ModuleHeader)
	var t, x, code, body bin
	t.u8(0x60).u32(f.params)
	for range f.params {
		t.u8(0x7f)
	}
	t.u32(f.results)
	for range f.results {
		t.u8(0x7f)
	}
	shim.section(1, 1, t)
	shim.section(3, 1, []byte{0})
	shim.section(4, 1, []byte{0x70, 1, 1, 1})
	x.str("f").u8(0, 0).str("$imports").u8(1, 0)
	shim.section(7, 2, x)
	body.u8(0)
	for k := range f.params {
		body.u8(0x20).u32(k)
	}
	body.i32(0).u8(0x11, 0, 0, 0x0b)
	code.sized(body)
	shim.section(10, 1, code)
	fix := bin(wasmbin.ModuleHeader)
	fix.section(1, 1, t)
	var i, e bin
	i.str("").str("0").u8(0, 0).str("").str("$imports").u8(1, 0x70, 1, 1, 1)
	fix.section(2, 2, i)
	e.u8(0).i32(0).u8(0x0b, 1, 0)
	fix.section(9, 1, e)
	for _, m := range [][]byte{shim, fix} {
		c.out.u8(1)
		c.out.sized(m)
	}
	c.coreInstance(new(bin).u8(0).u32(1).u32(0))
	via := c.alias(0, "f", 0)
	c.coreInstance(new(bin).u8(1).u32(1).str(f.name).u8(0).u32(via))
	c.coreInstance(new(bin).u8(0).u32(0).u32(1).str(f.module).u8(0x12).u32(1))
}

// fill lowers the imported function and puts it into the table.
func (c *comp) fill(fn, memory, realloc int) {
	var canon bin
	canon.u8(1, 0).u32(fn).u32(3).u8(0, 3).u32(memory).u8(4).u32(realloc)
	c.out.section(8, 1, canon)
	lowered := c.coreFuncs
	c.coreFuncs++
	table := c.alias(0, "$imports", 1)
	c.coreInstance(new(bin).u8(1).u32(2).str("0").u8(0).u32(lowered).str("$imports").u8(1).u32(table))
	c.coreInstance(new(bin).u8(0).u32(2).u32(1).str("").u8(0x12).u32(3))
}

type signature struct {
	params []*wit.Type
	result *wit.Type
}

// alias gives an export of a core instance its own index. Only one memory is ever aliased.
func (c *comp) alias(instance int, name string, sort byte) int {
	var a bin
	a.u8(0, sort, 1).u32(instance).str(name)
	c.out.section(6, 1, a)
	if sort != 0 {
		return 0
	}
	c.coreFuncs++
	return c.coreFuncs - 1
}
