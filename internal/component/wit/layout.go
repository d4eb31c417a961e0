package wit

import "math"

// MaxFlat is the maximum number of core values that the canonical ABI passes as parameters. If there are more, all
// parameters go through memory. For results, the maximum is one.
const MaxFlat = 16

// CoreType is the type of a core value. The numbers are part of the format of [Program].
type CoreType uint8

// The core types.
const (
	I32 CoreType = iota
	I64
	CoreF32
	CoreF64
)

// Layout returns the type's size and alignment in linear memory, in bytes. A size that overflows is [math.MaxUint32].
func (t *Type) Layout() (size, align uint32) { return make(layouts).of(t) }

// Offsets returns the offsets in memory of a record's or tuple's fields.
func (t *Type) Offsets() []uint32 { return make(layouts).offsets(t) }

// Payload is for types with cases. It returns the size of the discriminant (1, 2 or 4) and the offset of the payload.
func (t *Type) Payload() (discriminant, offset uint32) { return make(layouts).payload(t) }

type layout struct{ size, align uint32 }

// layouts caches the layouts of types, because types can share parts. Without a cache, a chain of n records would take
// 2^n steps if each record has two fields of the next record's type.
type layouts map[*Type]layout

func (m layouts) of(t *Type) (size, align uint32) {
	if l, ok := m[t]; ok {
		return l.size, l.align
	}
	size, align = m.compute(t)
	m[t] = layout{size, align}
	return size, align
}

func (m layouts) compute(t *Type) (size, align uint32) {
	switch t.Kind {
	case Bool, S8, U8:
		return 1, 1
	case S16, U16:
		return 2, 2
	case S32, U32, F32, Char, Own, Borrow:
		return 4, 4
	case S64, U64, F64:
		return 8, 8
	case String, List:
		return 8, 4 // pointer and length
	case Flags:
		return flagsLayout(len(t.Cases))
	case Record, Tuple:
		var end uint32
		align = 1
		for _, f := range t.Fields {
			s, a := m.of(f.Type)
			end = add(alignUp(end, a), s)
			align = max(align, a)
		}
		return alignUp(end, align), align
	}
	discriminant, offset := m.payload(t)
	align = discriminant
	for _, p := range t.Payloads() {
		if p != nil {
			s, a := m.of(p)
			size, align = max(size, s), max(align, a)
		}
	}
	return alignUp(add(offset, size), align), align
}

func (m layouts) offsets(t *Type) []uint32 {
	all := make([]uint32, len(t.Fields))
	var end uint32
	for i, f := range t.Fields {
		s, a := m.of(f.Type)
		all[i] = alignUp(end, a)
		end = add(all[i], s)
	}
	return all
}

func (m layouts) payload(t *Type) (discriminant, offset uint32) {
	payloads := t.Payloads()
	switch n := len(payloads); {
	case n <= 1<<8:
		discriminant = 1
	case n <= 1<<16:
		discriminant = 2
	default:
		discriminant = 4
	}
	align := uint32(1)
	for _, p := range payloads {
		if p != nil {
			_, a := m.of(p)
			align = max(align, a)
		}
	}
	return discriminant, alignUp(discriminant, align)
}

func flagsLayout(n int) (size, align uint32) {
	switch {
	case n <= 8:
		return 1, 1
	case n <= 16:
		return 2, 2
	}
	return 4 * uint32((n+31)/32), 4
}

func add(a, b uint32) uint32 {
	if a > math.MaxUint32-b {
		return math.MaxUint32
	}
	return a + b
}

func alignUp(n, align uint32) uint32 {
	if n > math.MaxUint32-align {
		return math.MaxUint32
	}
	return (n + align - 1) &^ (align - 1)
}

// Flatten returns the types of the core values that represent the type, or nil and false if there are more than
// [MaxFlat].
func (t *Type) Flatten() ([]CoreType, bool) { return make(flattened).of(t) }

type flattened map[*Type][]CoreType

func (m flattened) of(t *Type) ([]CoreType, bool) {
	flat, ok := m[t]
	if !ok {
		flat = m.compute(t)
		if len(flat) > MaxFlat {
			flat = flat[:MaxFlat+1]
		}
		m[t] = flat
	}
	if len(flat) > MaxFlat {
		return nil, false
	}
	return flat, true
}

// tooMany stands for any list longer than MaxFlat.
var tooMany = make([]CoreType, MaxFlat+1)

func (m flattened) compute(t *Type) []CoreType {
	switch t.Kind {
	case Bool, S8, U8, S16, U16, S32, U32, Char, Enum, Own, Borrow:
		return []CoreType{I32}
	case S64, U64:
		return []CoreType{I64}
	case F32:
		return []CoreType{CoreF32}
	case F64:
		return []CoreType{CoreF64}
	case String, List:
		return []CoreType{I32, I32}
	case Flags:
		if len(t.Cases) > 32*MaxFlat {
			return tooMany
		}
		return make([]CoreType, (len(t.Cases)+31)/32)
	case Record, Tuple:
		var all []CoreType
		for _, f := range t.Fields {
			flat, ok := m.of(f.Type)
			if all = append(all, flat...); !ok || len(all) > MaxFlat {
				return tooMany
			}
		}
		return all
	}
	return m.cases(t)
}

// cases joins the core types of the payloads. At each position, the result has a core type that can hold what any of
// the payloads has at that position.
func (m flattened) cases(t *Type) []CoreType {
	joined := []CoreType{I32}
	for _, p := range t.Payloads() {
		if p == nil {
			continue
		}
		flat, ok := m.of(p)
		if !ok {
			return tooMany
		}
		for i, c := range flat {
			if i+1 == len(joined) {
				joined = append(joined, c)
			} else {
				joined[i+1] = joinCore(joined[i+1], c)
			}
		}
	}
	return joined
}

func joinCore(a, b CoreType) CoreType {
	switch {
	case a == b:
		return a
	case a == I32 && b == CoreF32, a == CoreF32 && b == I32:
		return I32
	}
	return I64
}
