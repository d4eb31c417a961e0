package protowit

import (
	"encoding/binary"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// op is the conversion of one value between the wire format (left) and flat bytes (right).
type op uint8

const (
	opNone    op = iota // messages
	opBool              // varint ↔ 1 byte
	op32                // varint of 32 bits, written sign-extended ↔ 4 bytes
	opU32               // varint of 32 bits ↔ 4 bytes
	opZig32             // zigzag varint ↔ 4 bytes
	opFixed32           // 4 bytes ↔ 4 bytes
	op64                // varint ↔ 8 bytes
	opZig64             // zigzag varint ↔ 8 bytes
	opFixed64           // 8 bytes ↔ 8 bytes
	opEnum              // varint ↔ case, and 4 bytes for an unrecognized number
	opString
	opBytes
)

type kindInfo struct {
	wire protowire.Type
	op   op
	typ  *wit.Type
}

var kinds = map[protoreflect.Kind]kindInfo{
	protoreflect.BoolKind:     {protowire.VarintType, opBool, boolType},
	protoreflect.Int32Kind:    {protowire.VarintType, op32, s32Type},
	protoreflect.Uint32Kind:   {protowire.VarintType, opU32, u32Type},
	protoreflect.Sint32Kind:   {protowire.VarintType, opZig32, s32Type},
	protoreflect.Fixed32Kind:  {protowire.Fixed32Type, opFixed32, u32Type},
	protoreflect.Sfixed32Kind: {protowire.Fixed32Type, opFixed32, s32Type},
	protoreflect.FloatKind:    {protowire.Fixed32Type, opFixed32, f32Type},
	protoreflect.Int64Kind:    {protowire.VarintType, op64, s64Type},
	protoreflect.Uint64Kind:   {protowire.VarintType, op64, u64Type},
	protoreflect.Sint64Kind:   {protowire.VarintType, opZig64, s64Type},
	protoreflect.Fixed64Kind:  {protowire.Fixed64Type, opFixed64, u64Type},
	protoreflect.Sfixed64Kind: {protowire.Fixed64Type, opFixed64, s64Type},
	protoreflect.DoubleKind:   {protowire.Fixed64Type, opFixed64, f64Type},
	protoreflect.EnumKind:     {protowire.VarintType, opEnum, nil},
	protoreflect.StringKind:   {protowire.BytesType, opString, stringType},
	protoreflect.BytesKind:    {protowire.BytesType, opBytes, bytesType},
	protoreflect.MessageKind:  {protowire.BytesType, opNone, nil},
	protoreflect.GroupKind:    {protowire.StartGroupType, opNone, nil},
}

func le32(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }
func le64(b []byte) uint64 { return binary.LittleEndian.Uint64(b) }

// scalar appends the flat form of a value that is not a message.
func (d *decoder) scalar(dst []byte, f *field, r record) []byte {
	if f.op == opString || f.op == opBytes {
		return wit.AppendBytes(dst, d.b[r.start:r.end])
	}
	return number(dst, f, r.bits)
}

// number appends a numeric value. Varints are cut to the width of the field, as in protobuf.
func number(dst []byte, f *field, v uint64) []byte {
	switch f.op {
	case opBool:
		return wit.AppendBool(dst, v != 0)
	case op32, opU32, opFixed32:
		return wit.AppendU32(dst, uint32(v))
	case opZig32:
		return wit.AppendU32(dst, zigzag32(uint32(v)))
	case opZig64:
		return wit.AppendU64(dst, zigzag64(v))
	case opEnum:
		n := int32(v)
		if c, ok := f.enum.caseOf(n); ok {
			return wit.AppendU32(dst, c)
		}
		return wit.AppendU32(wit.AppendU32(dst, uint32(len(f.enum.numbers))), uint32(n))
	}
	return wit.AppendU64(dst, v)
}

// packed appends the values of a packed list and returns how many they are.
func packed(dst []byte, f *field, b []byte) (_ []byte, n int, err error) {
	switch f.wire {
	case protowire.Fixed32Type:
		if len(b)%4 != 0 {
			return nil, len(b) / 4, errTruncated
		}
		return append(dst, b...), len(b) / 4, nil // the bytes are the same in both encodings
	case protowire.Fixed64Type:
		if len(b)%8 != 0 {
			return nil, len(b) / 8, errTruncated
		}
		return append(dst, b...), len(b) / 8, nil
	}
	for pos := 0; pos < len(b); n++ {
		var v uint64
		if v, pos, err = varint(b, pos); err != nil {
			return nil, n, err
		}
		dst = number(dst, f, v)
	}
	return dst, n, nil
}
