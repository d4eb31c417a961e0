package wit

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/containerd/errdefs"
)

// AppendBool appends a bool.
func AppendBool(dst []byte, v bool) []byte {
	if v {
		return append(dst, 1)
	}
	return append(dst, 0)
}

// AppendU8 appends a u8 or s8.
func AppendU8(dst []byte, v uint8) []byte { return append(dst, v) }

// AppendU16 appends a u16 or s16.
func AppendU16(dst []byte, v uint16) []byte { return binary.LittleEndian.AppendUint16(dst, v) }

// AppendU32 appends a u32, s32, char or case, or the representation of a resource.
func AppendU32(dst []byte, v uint32) []byte { return binary.LittleEndian.AppendUint32(dst, v) }

// AppendU64 appends a u64 or s64.
func AppendU64(dst []byte, v uint64) []byte { return binary.LittleEndian.AppendUint64(dst, v) }

// AppendF32 appends an f32.
func AppendF32(dst []byte, v float32) []byte { return AppendU32(dst, math.Float32bits(v)) }

// AppendF64 appends an f64.
func AppendF64(dst []byte, v float64) []byte { return AppendU64(dst, math.Float64bits(v)) }

// AppendLen begins a list of n elements. The caller appends the elements.
func AppendLen(dst []byte, n int) []byte { return AppendU32(dst, uint32(n)) }

// AppendCase begins a variant, enum, option or result. The caller appends the payload, if any.
func AppendCase(dst []byte, i int) []byte { return AppendU32(dst, uint32(i)) }

// AppendString appends a string.
func AppendString(dst []byte, s string) []byte { return append(AppendLen(dst, len(s)), s...) }

// AppendBytes appends a list<u8>.
func AppendBytes(dst, b []byte) []byte { return append(AppendLen(dst, len(b)), b...) }

// AppendOption begins an option. If some is true, the caller appends the value.
func AppendOption(dst []byte, some bool) []byte {
	if some {
		return AppendCase(dst, 1)
	}
	return AppendCase(dst, 0)
}

// Reader reads flat values. After the first error, which Err returns, every read returns the zero value. A Reader never
// panics, whatever the input. Only String and errors allocate memory.
type Reader struct {
	b   []byte
	pos int
	err error
}

// NewReader makes a Reader that reads from b. The byte slices that the Reader returns share memory with b.
func NewReader(b []byte) *Reader { return &Reader{b: b} }

// Err returns the first error, an errdefs.ErrInvalidArgument. Reading past the end is an error.
func (r *Reader) Err() error { return r.err }

// Pos returns the number of bytes read.
func (r *Reader) Pos() int { return r.pos }

// Rest returns the unread bytes.
func (r *Reader) Rest() []byte { return r.b[r.pos:] }

// Fail sets the reader's error, unless it already has one.
func (r *Reader) Fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("flat value at byte %d: %s: %w", r.pos, fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
	}
}

// Raw reads n bytes.
func (r *Reader) Raw(n int) []byte {
	if r.err != nil || n < 0 || n > len(r.b)-r.pos {
		r.Fail("%d bytes needed, %d left", n, len(r.b)-r.pos)
		return nil
	}
	r.pos += n
	return r.b[r.pos-n : r.pos : r.pos]
}

// U8 reads a u8 or s8.
func (r *Reader) U8() uint8 {
	if b := r.Raw(1); b != nil {
		return b[0]
	}
	return 0
}

// Bool reads a bool, which must be 0 or 1.
func (r *Reader) Bool() bool {
	v := r.U8()
	if v > 1 {
		r.Fail("a bool of %d", v)
	}
	return v == 1
}

// U16 reads a u16 or s16.
func (r *Reader) U16() uint16 {
	if b := r.Raw(2); b != nil {
		return binary.LittleEndian.Uint16(b)
	}
	return 0
}

// U32 reads a u32, s32 or char, or the representation of a resource.
func (r *Reader) U32() uint32 {
	if b := r.Raw(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

// U64 reads a u64 or s64.
func (r *Reader) U64() uint64 {
	if b := r.Raw(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// F32 reads an f32.
func (r *Reader) F32() float32 { return math.Float32frombits(r.U32()) }

// F64 reads an f64.
func (r *Reader) F64() float64 { return math.Float64frombits(r.U64()) }

// Case reads the case of a value whose type has n cases.
func (r *Reader) Case(n int) int {
	c := r.U32()
	if uint64(c) >= uint64(n) {
		r.Fail("case %d of %d", c, n)
		return 0
	}
	return int(c)
}

// Option begins to read an option. It reports whether a value follows.
func (r *Reader) Option() bool { return r.Case(2) == 1 }

// Len reads the number of elements of a list. The result never exceeds the number of bytes left, so a caller can safely
// allocate that many elements. No valid list is refused: every element takes at least one byte, because the component
// model has no empty types.
func (r *Reader) Len() int {
	n := r.U32()
	if uint64(n) > uint64(len(r.b)-r.pos) {
		r.Fail("a list of %d elements in %d bytes", n, len(r.b)-r.pos)
		return 0
	}
	return int(n)
}

// Bytes reads a list<u8>, or reads a string without checking that it is UTF-8. The result shares memory with the
// reader's input.
func (r *Reader) Bytes() []byte { return r.Raw(r.Len()) }

// String reads a string.
func (r *Reader) String() string { return string(r.Bytes()) }
