package wasmbin

import (
	"encoding/binary"
	"slices"
)

// Instructions (5.4) that this package knows by name, and types.
const (
	opEnd       = 0x0b
	opCall      = 0x10
	opGlobalGet = 0x23
	opI32Const  = 0x41
	opI64Const  = 0x42
	opF32Const  = 0x43
	opF64Const  = 0x44
	opI32Add    = 0x6a
	opI32Sub    = 0x6b
	opI32Mul    = 0x6c
	opI64Add    = 0x7c
	opI64Sub    = 0x7d
	opI64Mul    = 0x7e
	opRefNull   = 0xd0
	opRefFunc   = 0xd2
	opMore      = 0xfc // the prefix of instructions for segments, tables and memory
	opVector    = 0xfd // the prefix of vector instructions

	// After opMore or opVector.
	opMemoryInit = 8
	opDataDrop   = 9
	opTableInit  = 12
	opElemDrop   = 13
	opV128Const  = 12

	typeFunc      = 0x60
	typeExternref = 0x6f
	typeFuncref   = 0x70
	typeF64       = 0x7c
	typeI32       = 0x7f
)

// immediate is what follows the code of an instruction.
type immediate byte

const (
	noneKnown immediate = iota // not an instruction
	nothing
	blockType
	number // an unsigned number
	signed
	bytes4
	bytes8
	bytes16
	lane      // one byte
	labels    // of br_table
	valTypes  // of select
	heapType  // of ref.null
	address   // memarg
	laneIn    // memarg and lane
	funcIndex // this and what follows: indices
	reference
	indirect // type, table
	globalIndex
	tableIndex
	twoTables
	memoryIndex
	twoMemories
	initMemory // data segment, memory
	dropData
	initTable // element segment, table
	dropElement
)

// span is a range of codes of instructions, inclusive.
type span struct {
	from, to uint32
	kind     immediate
}

// The instructions of WebAssembly 2.0, and of the proposals for tail calls and relaxed vectors: all that the engine knows.
var (
	plainCodes = spread(256, []span{
		{0x00, 0x01, nothing}, {0x02, 0x04, blockType}, {0x05, 0x05, nothing}, {0x0b, 0x0b, nothing}, {0x0c, 0x0d, number},
		{0x0e, 0x0e, labels}, {0x0f, 0x0f, nothing}, {0x10, 0x10, funcIndex}, {0x11, 0x11, indirect}, {0x12, 0x12, funcIndex},
		{0x13, 0x13, indirect}, {0x1a, 0x1b, nothing}, {0x1c, 0x1c, valTypes}, {0x20, 0x22, number}, {0x23, 0x24, globalIndex},
		{0x25, 0x26, tableIndex}, {0x28, 0x3e, address}, {0x3f, 0x40, memoryIndex}, {0x41, 0x42, signed}, {0x43, 0x43, bytes4},
		{0x44, 0x44, bytes8}, {0x45, 0xc4, nothing}, {0xd0, 0xd0, heapType}, {0xd1, 0xd1, nothing}, {0xd2, 0xd2, reference},
	})
	moreCodes = spread(18, []span{
		{0, 7, nothing}, {8, 8, initMemory}, {9, 9, dropData}, {10, 10, twoMemories}, {11, 11, memoryIndex}, {12, 12, initTable},
		{13, 13, dropElement}, {14, 14, twoTables}, {15, 17, tableIndex},
	})
	vectorCodes = spread(276, []span{
		{0, 11, address}, {12, 13, bytes16}, {14, 20, nothing}, {21, 34, lane}, {35, 83, nothing}, {84, 91, laneIn}, {92, 93, address},
		{94, 275, nothing},
	})
)

func spread(n int, spans []span) []immediate {
	all := make([]immediate, n)
	for _, s := range spans {
		for code := s.from; code <= s.to; code++ {
			all[code] = s.kind
		}
	}
	return all
}

// rewriter copies instructions with other indices.
type rewriter struct {
	*part
	c    *cursor
	from []byte // what has been read and not been copied
	out  []byte
}

// body copies the body of a function (5.5.13).
func (p *part) body(section *cursor) {
	code := section.take(section.u32())
	r := rewriter{part: p, c: &cursor{rest: code}, from: code, out: make([]byte, 0, len(code)+len(code)/8)}
	r.c.each(func() {
		r.c.u32()
		r.c.valType()
	})
	for len(r.c.rest) > 0 && r.c.err == nil {
		r.instruction()
	}
	if r.flush(r.c.rest); r.c.err != nil {
		section.err, section.rest = r.c.err, nil
	}
	if p.left -= len(r.out); p.left < 0 {
		section.refuse("its code is too large as one module")
	}
	p.codes.n++
	p.codes.bytes = append(binary.AppendUvarint(p.codes.bytes, uint64(len(r.out))), r.out...)
}

// flush copies what has been read up to the rest.
func (r *rewriter) flush(rest []byte) {
	r.out = append(r.out, r.from[:len(r.from)-len(rest)]...)
	r.from = rest
}

// index reads an index and writes another one.
func (r *rewriter) index(read func() uint32) {
	before := r.c.rest
	index := read()
	r.flush(before)
	r.out = binary.AppendUvarint(r.out, uint64(index))
	r.from = r.c.rest
}

func (r *rewriter) item(kind Kind) { r.index(func() uint32 { return r.at(r.c, kind) }) }

// reference copies a ref.func, whose function must be declared.
func (r *rewriter) reference() {
	r.index(func() uint32 {
		index := r.at(r.c, Func)
		if !r.declared[index] {
			r.declared[index] = true
			r.referenced.add(binary.AppendUvarint(nil, uint64(index)))
		}
		return index
	})
}

func (r *rewriter) instruction() {
	c := r.c
	op := c.u8()
	code, codes := uint32(op), plainCodes
	switch op {
	case opMore:
		code, codes = c.u32(), moreCodes
	case opVector:
		code, codes = c.u32(), vectorCodes
	}
	kind := noneKnown
	if uint64(code) < uint64(len(codes)) {
		kind = codes[code]
	}
	switch kind {
	case noneKnown:
		c.refuse("a core module has the instruction %#x %d", op, code)
	case nothing:
	case number:
		c.u32()
	case signed:
		c.signed()
	case lane:
		c.u8()
	case bytes4:
		c.take(4)
	case bytes8:
		c.take(8)
	case bytes16:
		c.take(16)
	case labels:
		c.each(func() { c.u32() })
		c.u32()
	case valTypes:
		c.each(c.valType)
	case heapType:
		c.valType()
	case blockType:
		r.block()
	case address, laneIn:
		r.address()
		if kind == laneIn {
			c.u8()
		}
	default:
		r.indices(kind)
	}
}

// indices copies an immediate that consists of indices.
func (r *rewriter) indices(kind immediate) {
	c := r.c
	segment := func(first, n uint32) {
		r.index(func() uint32 {
			k := c.u32()
			if k >= n {
				c.fail("there is no segment %d", k)
			}
			return first + k
		})
	}
	switch kind {
	case funcIndex:
		r.item(Func)
	case reference:
		r.reference()
	case indirect:
		r.index(func() uint32 { return r.typeAt(c) })
		r.item(Table)
	case globalIndex:
		r.item(Global)
	case tableIndex:
		r.usesTables = true
		r.item(Table)
	case twoTables:
		r.usesTables = true
		r.item(Table)
		r.item(Table)
	case memoryIndex:
		r.item(Memory)
	case twoMemories:
		r.item(Memory)
		r.item(Memory)
	case initMemory, dropData:
		r.counted = true
		if segment(r.firstData, r.numData); kind == initMemory {
			r.item(Memory)
		}
	case initTable, dropElement:
		r.usesTables = true
		if segment(r.firstElement, r.numElements); kind == initTable {
			r.item(Table)
		}
	}
}

// block copies the type of a block (5.3.6): a value type, nothing, or the index of a type as a signed number.
func (r *rewriter) block() {
	c := r.c
	if len(c.rest) > 0 && c.rest[0]&0xc0 == 0x40 { // a negative number of one byte
		if c.rest[0] != 0x40 {
			c.valType()
			return
		}
		c.u8()
		return
	}
	before := c.rest
	typ := r.typeAt(c)
	r.flush(before)
	r.out = appendSigned(r.out, int64(typ))
	r.from = c.rest
}

// address copies a memarg (5.4.6). Bit 6 of the alignment says that the index of a memory follows.
func (r *rewriter) address() {
	if r.c.u32()&0x40 != 0 {
		r.item(Memory)
	} else {
		r.first(r.c, Memory)
	}
	r.c.leb(64)
}

// constant reads a constant expression (3.3.13), calculates its value, and encodes an expression for it.
func (p *part) constant(c *cursor) []byte {
	var stack [][]byte
	for c.err == nil {
		from := c.rest
		op := c.u8()
		switch op {
		case opEnd:
			if len(stack) != 1 {
				c.fail("a constant expression with %d values", len(stack))
				return nil
			}
			return append(slices.Clip(stack[0]), opEnd)
		case opI32Const, opI64Const:
			c.signed()
		case opF32Const:
			c.take(4)
		case opF64Const:
			c.take(8)
		case opVector:
			if c.u32() != opV128Const {
				c.fail("an instruction that is not constant")
			}
			c.take(16)
		case opRefNull:
			c.valType()
		case opRefFunc:
			stack = append(stack, binary.AppendUvarint([]byte{opRefFunc}, uint64(p.at(c, Func))))
			continue
		case opGlobalGet:
			if n := p.at(c, Global); c.err == nil {
				stack = append(stack, p.constants[n])
			}
			continue
		case opI32Add, opI32Sub, opI32Mul, opI64Add, opI64Sub, opI64Mul:
			if len(stack) < 2 {
				c.fail("a constant expression without operands")
				return nil
			}
			last := len(stack) - 1
			stack = append(stack[:last-1], calculated(c, op, stack[last-1], stack[last]))
			continue
		default:
			c.fail("an instruction %#x that is not constant", op)
		}
		stack = append(stack, cut(from, c))
	}
	return nil
}

// calculated returns the result of an arithmetic instruction for two constants.
func calculated(c *cursor, op byte, a, b []byte) []byte {
	constOp, wide := byte(opI32Const), op >= opI64Add
	if wide {
		constOp = opI64Const
	}
	var v [2]int64
	for k, operand := range [][]byte{a, b} {
		o := &cursor{rest: operand}
		if o.u8() != constOp {
			c.fail("a constant expression with an operand of another type")
			return nil
		}
		v[k] = o.signed()
	}
	result := v[0] + v[1]
	switch op {
	case opI32Sub, opI64Sub:
		result = v[0] - v[1]
	case opI32Mul, opI64Mul:
		result = v[0] * v[1]
	}
	if !wide {
		result = int64(int32(result))
	}
	return appendSigned([]byte{constOp}, result)
}
