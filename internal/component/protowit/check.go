package protowit

import (
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// Some messages are checked but not converted: those that stay serialized, and those that a later member of their oneof
// replaces. The first pass is the same for them as for any other message. Instead of the second pass, the functions of
// this file check the message and write nothing. If the parameter partial is true, required fields may be missing.

// check checks a message that is spread over several pieces of the input.
func (d *decoder) check(m *Message, first uint32, depth int, partial bool) error {
	base, regions := d.push(m)
	for c := d.cursor(first); c.next(); {
		if err := d.index(m, base, c.record.start, c.record.end, depth); err != nil {
			return err
		}
	}
	err := d.checkSlots(m, base, depth, partial)
	d.pop(base, regions)
	return err
}

// checkOne checks a message that is contiguous in the input.
func (d *decoder) checkOne(m *Message, r record, depth int, partial bool) error {
	base, regions := d.push(m)
	if err := d.index(m, base, r.start, r.end, depth); err != nil {
		return err
	}
	err := d.checkSlots(m, base, depth, partial)
	d.pop(base, regions)
	return err
}

func (d *decoder) checkSlots(m *Message, base, depth int, partial bool) error {
	for i := range m.slots {
		s, st := &m.slots[i], d.states[base+i]
		f := s.fields[st.member]
		var err error
		switch {
		case s.kind == slotRequired && !st.set && !partial:
			err = errRequired
		case s.kind == slotList || s.kind == slotMap:
			err = d.checkList(f, st.first, depth, partial)
		case f.msg != nil && (st.set || s.kind == slotValue): // a missing map value is the empty message
			err = d.check(f.msg, st.first, depth+1, partial)
		}
		if err != nil {
			return within(err, f.name)
		}
	}
	return nil
}

func (d *decoder) checkList(f *field, first uint32, depth int, partial bool) error {
	n := 0
	for c := d.cursor(first); c.next(); n++ {
		var err error
		r := c.record
		switch {
		case f.entry != nil:
			err = d.checkOne(f.entry, r, depth, partial)
		case f.msg != nil:
			err = d.checkOne(f.msg, r, depth+1, partial)
		case f.op == opString && !utf8.Valid(d.b[r.start:r.end]):
			err = errUTF8
		case r.wire == protowire.BytesType && f.packable():
			err = checkPacked(f, d.b[r.start:r.end])
		}
		if err != nil {
			return element(err, n)
		}
	}
	return nil
}

func checkPacked(f *field, b []byte) error {
	switch f.wire {
	case protowire.Fixed32Type:
		if len(b)%4 != 0 {
			return errTruncated
		}
	case protowire.Fixed64Type:
		if len(b)%8 != 0 {
			return errTruncated
		}
	default:
		var err error
		for pos := 0; pos < len(b) && err == nil; {
			_, pos, err = varint(b, pos)
		}
		return err
	}
	return nil
}
