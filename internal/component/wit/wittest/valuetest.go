package wittest

import (
	"fmt"
	"math/rand/v2"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// Type makes a random type without resources. The type is valid, because no record or variant is empty, and it is
// usually small.
func Type(r *rand.Rand) *wit.Type { return typ(r, 3) }

func typ(r *rand.Rand, depth int) *wit.Type {
	if depth == 0 {
		return &wit.Type{Kind: wit.Kind(r.IntN(int(wit.String) + 1))}
	}
	t := &wit.Type{Kind: wit.Kind(r.IntN(int(wit.Flags) + 1))}
	switch t.Kind {
	case wit.List, wit.Option:
		t.Elem = typ(r, depth-1)
	case wit.Record, wit.Tuple:
		for i := range 1 + r.IntN(5) {
			f := wit.Field{Type: typ(r, depth-1)}
			if t.Kind == wit.Record {
				f.Name = fmt.Sprintf("field-%c", 'a'+i)
			}
			t.Fields = append(t.Fields, f)
		}
	case wit.Variant:
		for i := range 1 + r.IntN(5) {
			t.Cases = append(t.Cases, wit.Case{Name: fmt.Sprintf("case-%c", 'a'+i), Type: perhaps(r, depth-1)})
		}
	case wit.Enum, wit.Flags:
		for i := range 1 + r.IntN(20) {
			t.Cases = append(t.Cases, wit.Case{Name: fmt.Sprintf("case-%c", 'a'+i)})
		}
	case wit.Result:
		t.Ok, t.Err = perhaps(r, depth-1), perhaps(r, depth-1)
	}
	return t
}

func perhaps(r *rand.Rand, depth int) *wit.Type {
	if r.IntN(3) == 0 {
		return nil
	}
	return typ(r, depth)
}

// Append appends a random value of type t. Floats are never NaN, because a guest need not preserve NaN bits.
func Append(dst []byte, r *rand.Rand, t *wit.Type) []byte {
	switch t.Kind {
	case wit.Bool:
		return wit.AppendBool(dst, r.IntN(2) == 1)
	case wit.S8, wit.U8:
		return wit.AppendU8(dst, uint8(r.Uint32()))
	case wit.S16, wit.U16:
		return wit.AppendU16(dst, uint16(r.Uint32()))
	case wit.S32, wit.U32:
		return wit.AppendU32(dst, r.Uint32())
	case wit.S64, wit.U64:
		return wit.AppendU64(dst, r.Uint64())
	case wit.F32:
		return wit.AppendF32(dst, float32(r.NormFloat64()))
	case wit.F64:
		return wit.AppendF64(dst, r.NormFloat64())
	case wit.Char:
		return wit.AppendU32(dst, []uint32{0, 'a', 0xd7ff, 0xe000, 0x10ffff}[r.IntN(5)])
	case wit.String:
		return wit.AppendString(dst, []string{"", "a", "grüße", "日本", "\x00"}[r.IntN(5)])
	case wit.List:
		n := r.IntN(5)
		dst = wit.AppendLen(dst, n)
		for range n {
			dst = Append(dst, r, t.Elem)
		}
		return dst
	case wit.Record, wit.Tuple:
		for _, f := range t.Fields {
			dst = Append(dst, r, f.Type)
		}
		return dst
	case wit.Flags:
		for n := len(t.Cases); n > 0; n -= 32 {
			dst = wit.AppendU32(dst, r.Uint32()&uint32(uint64(1)<<min(n, 32)-1))
		}
		return dst
	}
	payloads := t.Payloads()
	i := r.IntN(len(payloads))
	dst = wit.AppendCase(dst, i)
	if payloads[i] != nil {
		dst = Append(dst, r, payloads[i])
	}
	return dst
}
