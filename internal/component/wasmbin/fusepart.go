package wasmbin

import (
	"bytes"
	"encoding/binary"
	"errors"
)

// count returns the number at the beginning of a section, or 0.
func (p *part) count(id byte) uint32 {
	if p.sections[id] == nil {
		return 0
	}
	return (&cursor{rest: p.sections[id].rest}).u32()
}

// section calls do for each element of a section.
func (p *part) section(id byte, do func(*cursor)) error {
	c := p.sections[id]
	if c == nil {
		return nil
	}
	if c.each(func() { do(c) }); c.err == nil && len(c.rest) > 0 {
		c.fail("%d bytes after its last element", len(c.rest))
	}
	if odd := errPlan(""); errors.As(c.err, &odd) {
		return odd
	}
	if c.err != nil {
		return damaged("section %d of a core module: %v", id, c.err)
	}
	return nil
}

// refuse ends the reading of a section, because the component must take the component path.
func (c *cursor) refuse(format string, args ...any) {
	if c.err == nil {
		c.err = unplanned(format, args...)
	}
	c.rest = nil
}

// at reads an index of the part, and returns the one in the module.
func (p *part) at(c *cursor, kind Kind) uint32 {
	n := c.u32()
	if c.err == nil && uint64(n) >= uint64(len(p.index[kind])) {
		c.fail("there is no item %d of kind %d", n, kind)
	}
	if c.err != nil {
		return 0
	}
	return p.index[kind][n]
}

// first checks that the part has a first item of a kind, which an instruction or segment refers to without an index.
func (p *part) first(c *cursor, kind Kind) uint32 {
	if len(p.index[kind]) == 0 {
		c.fail("there is no item 0 of kind %d", kind)
		return 0
	}
	return p.index[kind][0]
}

// typeAt reads an index of a type.
func (p *part) typeAt(c *cursor) uint32 {
	n := c.u32()
	if c.err == nil && n >= p.types.n-p.firstType {
		c.fail("there is no type %d", n)
	}
	return p.firstType + n
}

// next numbers the part's next item of a kind.
func (p *part) next(kind Kind, index uint32) { p.index[kind] = append(p.index[kind], index) }

// funcType copies a type of functions (5.3.6): the only types that are not part of the garbage collection proposal.
func (p *part) funcType(c *cursor) {
	from := c.rest
	if form := c.u8(); form != typeFunc {
		c.refuse("a core module has a type of the form %#x", form)
	}
	for range 2 {
		c.each(func() { c.valType() })
	}
	p.types.add(cut(from, c))
}

// valType reads a type of values that is one byte.
func (c *cursor) valType() {
	if t := c.u8(); t < typeExternref || t > typeI32 {
		c.refuse("a core module has values of the type %#x", t)
	}
}

// cut returns what a cursor has read.
func cut(from []byte, c *cursor) []byte { return from[:len(from)-len(c.rest)] }

// imported reads an import, which gets the index of what it imports.
func (p *part) imported(c *cursor) {
	i := c.moduleImport()
	switch {
	case i.Kind >= Tag:
		c.refuse("a core module imports an item of kind %d", i.Kind)
	case i.Kind == Func && i.Type >= p.types.n-p.firstType:
		c.fail("there is no type %d", i.Type)
	case len(p.imports) == 0:
		c.fail("an import more than there were")
	}
	if c.err != nil {
		return
	}
	if i.Kind == Func {
		p.own++
	}
	p.next(i.Kind, p.resolve(c, p.imports[0], i.Kind, p.firstType+i.Type))
	p.imports = p.imports[1:]
}

// resolve returns the index of what a part imports. The type is that of a function.
func (p *part) resolve(c *cursor, from core, kind Kind, typ uint32) uint32 {
	switch {
	case from.from == fromInstance:
		e, ok := p.parts[from.instance].exports[from.name]
		if !ok || e.kind != kind {
			c.fail("a core instance does not export %s", from.name)
		}
		return e.index
	case kind != Func:
		c.fail("the host provides functions only")
		return 0
	case from.from == fromTrap:
		return p.define(typ, []byte(trapBody))
	}
	n := p.hostOf[from.key()]
	p.importTypes[n] = typ
	return uint32(n)
}

// define adds a function to the module.
func (f *fusion) define(typ uint32, body []byte) uint32 {
	f.functions.add(binary.AppendUvarint(nil, uint64(typ)))
	if body != nil {
		f.codes.add(append(binary.AppendUvarint(nil, uint64(len(body))), body...))
	}
	return uint32(len(f.hosts)) + f.functions.n - 1
}

// function declares a function, whose body follows in the code section.
func (p *part) function(c *cursor) { p.next(Func, p.define(p.typeAt(c), nil)) }

func (p *part) table(c *cursor) {
	from := c.rest
	c.valType()
	c.limits()
	p.next(Table, p.tables.n)
	p.tables.add(cut(from, c))
}

func (p *part) memory(c *cursor) {
	from := c.rest
	c.limits()
	p.next(Memory, p.memories.n)
	p.memories.add(cut(from, c))
}

func (p *part) global(c *cursor) {
	from := c.rest
	c.valType()
	c.u8()
	typ := cut(from, c)
	value := p.constant(c)
	p.next(Global, p.globals.n)
	p.constants = append(p.constants, bytes.TrimSuffix(value, []byte{opEnd}))
	p.globals.n++
	p.globals.bytes = append(append(p.globals.bytes, typ...), value...)
}

func (p *part) export(c *cursor) {
	name, kind := c.name(), Kind(c.u8())
	if kind >= Tag {
		c.refuse("a core module exports an item of kind %d", kind)
		return
	}
	p.exports[name] = place{kind, p.at(c, kind)}
}

// element copies an element segment (5.5.12).
func (p *part) element(c *cursor) {
	flags := byte(min(c.u32(), 8))
	if flags > 7 {
		c.fail("an element segment of an unknown kind")
	}
	expressions := flags&4 != 0
	out := []byte{flags}
	var start func(uint32) []byte
	var table, first uint32
	if flags&1 == 0 { // it is active
		if flags&2 != 0 {
			table = p.at(c, Table)
		} else {
			table = p.first(c, Table)
		}
		offset := p.constant(c)
		if first = offsetOf(offset); len(p.starts) > 0 {
			p.late = true
			p.usesTables = p.usesTables || first < p.filled[table]
		}
		if len(p.starts) == 0 || p.early {
			out[0] |= 2 // the table is named
			out = append(binary.AppendUvarint(out, uint64(table)), offset...)
		} else {
			out[0] = flags&^2 | 1 // passive
			start = p.initialize(offset, opTableInit, opElemDrop, p.elements.n, table)
		}
	}
	switch {
	case flags&3 != 0: // the kind or type of the elements
		out = append(out, c.u8())
	case expressions:
		out = append(out, typeFuncref)
	default:
		out = append(out, 0)
	}
	n := c.u32()
	out = binary.AppendUvarint(out, uint64(n))
	if start != nil {
		p.starts = append(p.starts, start(n)...)
	}
	if flags&1 == 0 {
		p.filled[table] = max(p.filled[table], first+n)
	}
	for ; n > 0 && c.err == nil; n-- {
		if expressions {
			out = append(out, p.constant(c)...)
		} else {
			out = binary.AppendUvarint(out, uint64(p.at(c, Func)))
		}
	}
	p.elements.add(out)
}

// offsetOf returns the value of an encoded i32.const.
func offsetOf(constant []byte) uint32 {
	c := &cursor{rest: constant}
	c.u8()
	return uint32(c.signed())
}

// initialize returns the code that does what an active segment does (4.5.4), for a number of elements or bytes.
func (p *part) initialize(offset []byte, init, drop uint32, segment, to uint32) func(n uint32) []byte {
	return func(n uint32) []byte {
		code := append(bytes.TrimSuffix(offset, []byte{opEnd}), opI32Const, 0, opI32Const)
		code = append(appendSigned(code, int64(int32(n))), opMore)
		code = binary.AppendUvarint(binary.AppendUvarint(code, uint64(init)), uint64(segment))
		code = append(binary.AppendUvarint(code, uint64(to)), opMore)
		return binary.AppendUvarint(binary.AppendUvarint(code, uint64(drop)), uint64(segment))
	}
}

// segment copies a data segment (5.5.14).
func (p *part) segment(c *cursor) {
	out := []byte{0}
	var start func(uint32) []byte
	switch flags := c.u32(); flags {
	case 0, 2:
		if flags == 2 {
			p.at(c, Memory)
		} else {
			p.first(c, Memory)
		}
		if offset := p.constant(c); len(p.starts) == 0 {
			out = append(out, offset...)
		} else {
			out[0], p.counted = 1, true
			start = p.initialize(offset, opMemoryInit, opDataDrop, p.data.n, 0)
		}
	case 1:
		out[0] = 1
	default:
		c.fail("a data segment of kind %d", flags)
	}
	content := c.take(c.u32())
	if start != nil {
		p.starts = append(p.starts, start(uint32(len(content)))...)
	}
	p.data.add(binary.AppendUvarint(out, uint64(len(content))))
	p.data.bytes = append(p.data.bytes, content...)
}

// functionNames copies the names of functions (the section "name", 7.4), which traps show.
func (p *part) functionNames() {
	c := p.sections[sectionCustom]
	for c != nil && len(c.rest) > 0 {
		id, content := c.u8(), &cursor{rest: c.take(c.u32())}
		if id != 1 {
			continue
		}
		last := int64(-1)
		content.each(func() {
			n, name := content.u32(), content.name()
			if content.err != nil || int64(n) <= last || n < p.own || uint64(n) >= uint64(len(p.index[Func])) {
				return
			}
			last = int64(n)
			p.names.add(appendName(binary.AppendUvarint(nil, uint64(p.index[Func][n])), name))
		})
	}
}
