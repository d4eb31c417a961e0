package protowit

import (
	"math"
	"math/bits"

	"google.golang.org/protobuf/encoding/protowire"
)

// varint reads the varint at pos. If it has a tenth byte, that byte must not exceed 1.
func varint(b []byte, pos int) (v uint64, next int, err error) {
	if pos < len(b) && b[pos] < 0x80 {
		return uint64(b[pos]), pos + 1, nil
	}
	for shift := uint(0); shift < 64; shift += 7 {
		if pos >= len(b) {
			return 0, 0, errTruncated
		}
		c := b[pos]
		pos++
		if c < 0x80 {
			if shift == 63 && c > 1 {
				return 0, 0, errVarint
			}
			return v | uint64(c)<<shift, pos, nil
		}
		v |= uint64(c&0x7f) << shift
	}
	return 0, 0, errVarint
}

// tag reads a field's number and wire type. Callers must refuse numbers above protowire.MaxValidNumber, except in
// unknown groups: there such numbers are accepted, as in Go's protobuf library.
func tag(b []byte, pos int) (n protowire.Number, wire protowire.Type, next int, err error) {
	v, next, err := varint(b, pos)
	if err != nil {
		return 0, 0, 0, err
	}
	if number := v >> 3; number < 1 || number > math.MaxInt32 {
		return 0, 0, 0, errFieldNumber
	}
	return protowire.Number(v >> 3), protowire.Type(v & 7), next, nil
}

// record is one field in the input. For varint and fixed wire types, bits is the value. For bytes and groups, start and
// end are the bounds of the payload.
type record struct {
	wire       protowire.Type
	bits       uint64
	start, end int
}

// read reads the value after a tag. The result next is the position after the value. The payload of a group ends before
// the end tag.
func read(b []byte, n protowire.Number, wire protowire.Type, pos int) (r record, next int, err error) {
	r.wire = wire
	switch wire {
	case protowire.VarintType:
		r.bits, next, err = varint(b, pos)
		return r, next, err
	case protowire.Fixed32Type:
		if len(b)-pos < 4 {
			return r, 0, errTruncated
		}
		r.bits = uint64(le32(b[pos:]))
		return r, pos + 4, nil
	case protowire.Fixed64Type:
		if len(b)-pos < 8 {
			return r, 0, errTruncated
		}
		r.bits = le64(b[pos:])
		return r, pos + 8, nil
	case protowire.BytesType:
		size, start, err := varint(b, pos)
		if err != nil {
			return r, 0, err
		}
		if size > uint64(len(b)-start) {
			return r, 0, errTruncated
		}
		r.start, r.end = start, start+int(size)
		return r, r.end, nil
	case protowire.StartGroupType:
		r.start = pos
		r.end, next, err = group(b, n, pos)
		return r, next, err
	case protowire.EndGroupType:
		return r, 0, errEndGroup
	}
	return r, 0, errWireType
}

// group finds the end of a group. The result end is the position of the group's end tag, and next is the position after
// the end tag.
func group(b []byte, n protowire.Number, pos int) (end, next int, err error) {
	var open [MaxDepth + 1]protowire.Number
	open[0] = n
	for depth := 0; ; {
		at := pos
		n, wire, after, err := tag(b, pos)
		if err != nil {
			return 0, 0, err
		}
		switch wire {
		case protowire.StartGroupType:
			if depth++; depth > MaxDepth {
				return 0, 0, errDepth
			}
			open[depth] = n
			pos = after
		case protowire.EndGroupType:
			if open[depth] != n {
				return 0, 0, errEndGroup
			}
			if depth == 0 {
				return at, after, nil
			}
			depth--
			pos = after
		default:
			if _, pos, err = read(b, n, wire, after); err != nil {
				return 0, 0, err
			}
		}
	}
}

// varintLen returns the size of a varint in bytes.
func varintLen(v uint64) int { return (bits.Len64(v|1) + 6) / 7 }

func zigzag32(v uint32) uint32 { return v>>1 ^ -(v & 1) }
func zigzag64(v uint64) uint64 { return v>>1 ^ -(v & 1) }

func unzigzag32(v uint32) uint32 { return v<<1 ^ uint32(int32(v)>>31) }
func unzigzag64(v uint64) uint64 { return v<<1 ^ uint64(int64(v)>>63) }

// MaxMessage is the maximum size of a message, in bytes.
const MaxMessage = math.MaxInt32
