package protowit

import (
	"slices"
	"sync"

	"google.golang.org/protobuf/encoding/protowire"
)

// Encode appends the serialized message for a flat value to dst. The value must have the type m.Type. The same value
// always gives the same bytes: fields are in the order of their numbers (a oneof is at its lowest number), fields
// without presence are omitted if they have the default value, and maps keep the guest's order. Errors are of type
// [*Error].
func (m *Message) Encode(dst, flat []byte) ([]byte, error) {
	e := encoders.Get().(*encoder)
	defer e.release()
	e.b = flat
	size, err := e.measure(m)
	switch {
	case err != nil:
		return nil, whole(err)
	case e.pos != len(flat):
		return nil, &Error{Err: errGuestFlat}
	case size > MaxMessage:
		return nil, &Error{Err: errGuestSize}
	}
	e.pos = 0
	return e.write(slices.Grow(dst, size), m), nil
}

// encoder is the state of one conversion. The first pass (measure.go) reads and checks the flat value, and saves the
// size of everything that is length-prefixed. The second pass uses these sizes in the same order.
type encoder struct {
	b     []byte
	pos   int
	bad   bool // a read went past the end, or found an invalid value
	sizes []int
	used  int
}

var encoders = sync.Pool{New: func() any { return new(encoder) }}

func (e *encoder) release() {
	sizes := e.sizes[:0]
	*e = encoder{sizes: sizes}
	if cap(sizes) <= 1<<16 {
		encoders.Put(e)
	}
}

// size returns the next of the sizes that the first pass has saved.
func (e *encoder) size() int {
	e.used++
	return e.sizes[e.used-1]
}

func (e *encoder) raw(n int) []byte {
	if e.bad || n > len(e.b)-e.pos {
		e.bad = true
		return nil
	}
	e.pos += n
	return e.b[e.pos-n : e.pos]
}

func (e *encoder) u32() uint32 {
	if b := e.raw(4); b != nil {
		return le32(b)
	}
	return 0
}

// count reads the length of a list or string. It refuses a length greater than the number of bytes left, because every
// element takes at least one byte.
func (e *encoder) count() int {
	n := e.u32()
	if uint64(n) > uint64(len(e.b)-e.pos) {
		e.bad = true
		return 0
	}
	return int(n)
}

func (e *encoder) bytes() []byte { return e.raw(e.count()) }

// which reads the case of a value whose type has n cases.
func (e *encoder) which(n int) int {
	c := e.u32()
	if uint64(c) >= uint64(n) {
		e.bad = true
		return 0
	}
	return int(c)
}

// number reads a numeric value and returns the bits to put on the wire.
func (e *encoder) number(f *field) uint64 {
	switch f.op {
	case opBool:
		b := e.raw(1)
		if b == nil || b[0] > 1 {
			e.bad = true
			return 0
		}
		return uint64(b[0])
	case op32:
		return uint64(int64(int32(e.u32())))
	case opU32, opFixed32:
		return uint64(e.u32())
	case opZig32:
		return uint64(unzigzag32(e.u32()))
	case opEnum:
		n := int32(0)
		if c := e.which(len(f.enum.numbers) + 1); c < len(f.enum.numbers) {
			n = f.enum.numbers[c]
		} else {
			n = int32(e.u32())
		}
		return uint64(int64(n))
	}
	b := e.raw(8)
	if b == nil {
		return 0
	}
	if f.op == opZig64 {
		return unzigzag64(le64(b))
	}
	return le64(b)
}

// write is the second pass of Encode.
func (e *encoder) write(dst []byte, m *Message) []byte {
	if len(m.slots) == 0 {
		e.u32()
		return dst
	}
	for i := range m.slots {
		s := &m.slots[i]
		f := s.fields[0]
		switch s.kind {
		case slotValue:
			dst = e.writeImplicit(dst, f)
		case slotRequired:
			dst = e.writeField(dst, f)
		case slotOption:
			if e.which(2) == 1 {
				dst = e.writeField(dst, f)
			}
		case slotOneof:
			if e.which(2) == 1 {
				dst = e.writeField(dst, s.fields[e.which(len(s.fields))])
			}
		case slotList:
			dst = e.writeList(dst, f)
		case slotMap:
			for range e.count() {
				dst = protowire.AppendVarint(append(dst, f.tag...), uint64(e.size()))
				dst = e.writeField(dst, f.entry.slots[0].fields[0])
				dst = e.writeField(dst, f.entry.slots[1].fields[0])
			}
		}
	}
	return dst
}

// writeImplicit writes a field without presence, unless it has the default value.
func (e *encoder) writeImplicit(dst []byte, f *field) []byte {
	if f.op == opString || f.op == opBytes {
		b := e.bytes()
		if len(b) == 0 {
			return dst
		}
		return appendBytes(dst, f, b)
	}
	v := e.number(f)
	if v == 0 {
		return dst
	}
	return appendNumber(append(dst, f.tag...), f.wire, v)
}

// writeField writes one value with its tag.
func (e *encoder) writeField(dst []byte, f *field) []byte {
	switch {
	case f.op == opString || f.op == opBytes:
		return appendBytes(dst, f, e.bytes())
	case f.op != opNone:
		dst = append(dst, f.tag...)
		return appendNumber(dst, f.wire, e.number(f))
	case f.endTag != nil:
		dst = append(dst, f.tag...)
		if f.raw {
			dst = append(dst, e.bytes()...)
		} else {
			dst = e.write(dst, f.msg)
		}
		return append(dst, f.endTag...)
	case f.raw:
		return appendBytes(dst, f, e.bytes())
	}
	dst = protowire.AppendVarint(append(dst, f.tag...), uint64(e.size()))
	return e.write(dst, f.msg)
}

func (e *encoder) writeList(dst []byte, f *field) []byte {
	n := e.count()
	if n == 0 {
		return dst
	}
	if !f.packed {
		for range n {
			dst = e.writeField(dst, f)
		}
		return dst
	}
	dst = append(dst, f.tag...)
	switch f.wire {
	case protowire.Fixed32Type:
		return append(protowire.AppendVarint(dst, uint64(4*n)), e.raw(4*n)...)
	case protowire.Fixed64Type:
		return append(protowire.AppendVarint(dst, uint64(8*n)), e.raw(8*n)...)
	}
	dst = protowire.AppendVarint(dst, uint64(e.size()))
	for range n {
		dst = protowire.AppendVarint(dst, e.number(f))
	}
	return dst
}

func appendBytes(dst []byte, f *field, b []byte) []byte {
	dst = protowire.AppendVarint(append(dst, f.tag...), uint64(len(b)))
	return append(dst, b...)
}

func appendNumber(dst []byte, wire protowire.Type, v uint64) []byte {
	switch wire {
	case protowire.Fixed32Type:
		return protowire.AppendFixed32(dst, uint32(v))
	case protowire.Fixed64Type:
		return protowire.AppendFixed64(dst, v)
	}
	return protowire.AppendVarint(dst, v)
}
