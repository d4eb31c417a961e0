package wit

import "unicode/utf8"

// Check reads a value of type t and checks every part of the value. It refuses bools other than 0 and 1, unknown cases
// and flags, chars that are not Unicode scalar values, and strings that are not UTF-8.
func (r *Reader) Check(t *Type) {
	switch t.Kind {
	case Bool:
		r.Bool()
	case S8, U8:
		r.U8()
	case S16, U16:
		r.U16()
	case S32, U32, F32, Own, Borrow:
		r.U32()
	case S64, U64, F64:
		r.U64()
	case Char:
		if c := r.U32(); c >= 0x110000 || !utf8.ValidRune(rune(c)) {
			r.Fail("%#x is not a Unicode scalar value", c)
		}
	case String:
		if !utf8.Valid(r.Bytes()) {
			r.Fail("a string that is not UTF-8")
		}
	case List:
		r.checkList(t.Elem)
	case Record, Tuple:
		for _, f := range t.Fields {
			r.Check(f.Type)
		}
	case Flags:
		r.checkFlags(len(t.Cases))
	default:
		payloads := t.Payloads()
		if p := payloads[r.Case(len(payloads))]; r.err == nil && p != nil {
			r.Check(p)
		}
	}
}

func (r *Reader) checkList(elem *Type) {
	n := r.Len()
	if elem.Kind == U8 || elem.Kind == S8 {
		r.Raw(n)
		return
	}
	for i := 0; i < n && r.err == nil; i++ {
		r.Check(elem)
	}
}

func (r *Reader) checkFlags(n int) {
	for ; n > 0; n -= 32 {
		if w := r.U32(); n < 32 && w>>n != 0 {
			r.Fail("flags %#x, but the type has %d flags", w, n)
		}
	}
}
