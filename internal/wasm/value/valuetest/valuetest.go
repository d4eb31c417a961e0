package valuetest

import (
	"fmt"
	"math/rand/v2"

	"github.com/tripod-run/tripod/internal/wasm/value"
)

// Type makes a type, without resources. It is small as a rule, and valid: no record or variant is empty.
func Type(r *rand.Rand) *value.Type { return typ(r, 3) }

func typ(r *rand.Rand, depth int) *value.Type {
	if depth == 0 {
		return &value.Type{Kind: value.Kind(r.IntN(int(value.String) + 1))}
	}
	t := &value.Type{Kind: value.Kind(r.IntN(int(value.Flags) + 1))}
	switch t.Kind {
	case value.List, value.Option:
		t.Elem = typ(r, depth-1)
	case value.Record, value.Tuple:
		for i := range 1 + r.IntN(5) {
			f := value.Field{Type: typ(r, depth-1)}
			if t.Kind == value.Record {
				f.Name = fmt.Sprintf("field-%c", 'a'+i)
			}
			t.Fields = append(t.Fields, f)
		}
	case value.Variant:
		for i := range 1 + r.IntN(5) {
			t.Cases = append(t.Cases, value.Case{Name: fmt.Sprintf("case-%c", 'a'+i), Type: perhaps(r, depth-1)})
		}
	case value.Enum, value.Flags:
		for i := range 1 + r.IntN(20) {
			t.Cases = append(t.Cases, value.Case{Name: fmt.Sprintf("case-%c", 'a'+i)})
		}
	case value.Result:
		t.Ok, t.Err = perhaps(r, depth-1), perhaps(r, depth-1)
	}
	return t
}

func perhaps(r *rand.Rand, depth int) *value.Type {
	if r.IntN(3) == 0 {
		return nil
	}
	return typ(r, depth)
}

// Append appends a value of the type. Floats are no NaN, whose bits need not survive a guest.
func Append(dst []byte, r *rand.Rand, t *value.Type) []byte {
	switch t.Kind {
	case value.Bool:
		return value.AppendBool(dst, r.IntN(2) == 1)
	case value.S8, value.U8:
		return value.AppendU8(dst, uint8(r.Uint32()))
	case value.S16, value.U16:
		return value.AppendU16(dst, uint16(r.Uint32()))
	case value.S32, value.U32:
		return value.AppendU32(dst, r.Uint32())
	case value.S64, value.U64:
		return value.AppendU64(dst, r.Uint64())
	case value.F32:
		return value.AppendF32(dst, float32(r.NormFloat64()))
	case value.F64:
		return value.AppendF64(dst, r.NormFloat64())
	case value.Char:
		return value.AppendU32(dst, []uint32{0, 'a', 0xd7ff, 0xe000, 0x10ffff}[r.IntN(5)])
	case value.String:
		return value.AppendString(dst, []string{"", "a", "grüße", "日本", "\x00"}[r.IntN(5)])
	case value.List:
		n := r.IntN(5)
		dst = value.AppendLen(dst, n)
		for range n {
			dst = Append(dst, r, t.Elem)
		}
		return dst
	case value.Record, value.Tuple:
		for _, f := range t.Fields {
			dst = Append(dst, r, f.Type)
		}
		return dst
	case value.Flags:
		for n := len(t.Cases); n > 0; n -= 32 {
			dst = value.AppendU32(dst, r.Uint32()&uint32(uint64(1)<<min(n, 32)-1))
		}
		return dst
	}
	payloads := t.Payloads()
	i := r.IntN(len(payloads))
	dst = value.AppendCase(dst, i)
	if payloads[i] != nil {
		dst = Append(dst, r, payloads[i])
	}
	return dst
}
