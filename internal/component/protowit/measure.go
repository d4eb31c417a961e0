package protowit

import (
	"fmt"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/protowire"
)

// measure is the first pass of Encode. It returns the size of the message.
func (e *encoder) measure(m *Message) (size int, err error) {
	if len(m.slots) == 0 {
		e.which(1)
		return 0, e.err()
	}
	for i := range m.slots {
		s := &m.slots[i]
		f := s.fields[0]
		n := 0
		switch s.kind {
		case slotValue:
			n, err = e.measureImplicit(f)
		case slotRequired:
			n, err = e.measureField(f)
		case slotOption:
			if e.which(2) == 1 {
				n, err = e.measureField(f)
			}
		case slotOneof:
			if e.which(2) == 1 {
				f = s.fields[e.which(len(s.fields))]
				n, err = e.measureField(f)
			}
		case slotList:
			n, err = e.measureList(f)
		case slotMap:
			n, err = e.measureMap(f)
		}
		if err == nil {
			err = e.err()
		}
		if err != nil {
			return 0, within(err, f.name)
		}
		size += n
	}
	return size, nil
}

// err returns an error if any read so far has failed.
func (e *encoder) err() error {
	if e.bad {
		return errGuestFlat
	}
	return nil
}

func (e *encoder) measureImplicit(f *field) (int, error) {
	if f.op == opString || f.op == opBytes {
		b := e.bytes()
		if len(b) == 0 {
			return 0, nil
		}
		return len(f.tag) + prefixed(len(b)), checkText(f, b)
	}
	v := e.number(f)
	if v == 0 {
		return 0, nil
	}
	return len(f.tag) + numberLen(f.wire, v), nil
}

// checkText checks that a string is UTF-8.
func checkText(f *field, b []byte) error {
	if f.op == opString && !utf8.Valid(b) {
		return errGuestUTF8
	}
	return nil
}

// measureField returns the size of one value with its tag.
func (e *encoder) measureField(f *field) (int, error) {
	switch {
	case f.op == opString || f.op == opBytes:
		b := e.bytes()
		return len(f.tag) + prefixed(len(b)), checkText(f, b)
	case f.op != opNone:
		return len(f.tag) + numberLen(f.wire, e.number(f)), nil
	case f.endTag != nil:
		n, err := e.measureGroup(f)
		return len(f.tag) + n + len(f.endTag), err
	case f.raw:
		b := e.bytes()
		return len(f.tag) + prefixed(len(b)), e.checkRaw(f.msg, b)
	}
	i := len(e.sizes)
	e.sizes = append(e.sizes, 0)
	n, err := e.measure(f.msg)
	e.sizes[i] = n
	return len(f.tag) + prefixed(n), err
}

func (e *encoder) measureGroup(f *field) (int, error) {
	if f.raw {
		b := e.bytes()
		return len(b), e.checkRaw(f.msg, b)
	}
	return e.measure(f.msg)
}

// checkRaw checks a message that the guest has serialized itself. Without this check, clients could get a damaged
// message. If a damaged message were a group, clients could take the fields after the group for a part of it.
func (e *encoder) checkRaw(m *Message, b []byte) error {
	if e.bad || len(b) > MaxMessage {
		return errGuestFlat
	}
	d := decoders.Get().(*decoder)
	defer d.release()
	d.b = b
	if err := d.checkOne(m, record{end: len(b)}, 0, false); err != nil {
		return fmt.Errorf("the guest's bytes are not a valid %s: %v: %w", m.Desc.FullName(), err, errdefs.ErrInternal)
	}
	return nil
}

func (e *encoder) measureList(f *field) (size int, err error) {
	n := e.count()
	if n == 0 {
		return 0, nil
	}
	if f.packed {
		return len(f.tag) + prefixed(e.measurePacked(f, n)), nil
	}
	for i := range n {
		one, err := e.measureField(f)
		if err == nil {
			err = e.err()
		}
		if err != nil {
			return 0, element(err, i)
		}
		size += one
	}
	return size, nil
}

func (e *encoder) measurePacked(f *field, n int) (size int) {
	switch f.wire {
	case protowire.Fixed32Type:
		e.raw(4 * n)
		return 4 * n
	case protowire.Fixed64Type:
		e.raw(8 * n)
		return 8 * n
	}
	for range n {
		size += varintLen(e.number(f))
	}
	e.sizes = append(e.sizes, size)
	return size
}

func (e *encoder) measureMap(f *field) (size int, err error) {
	for i := range e.count() {
		at := len(e.sizes)
		e.sizes = append(e.sizes, 0)
		for j := range f.entry.slots {
			n, err := e.measureField(f.entry.slots[j].fields[0])
			if err == nil {
				err = e.err()
			}
			if err != nil {
				return 0, element(within(err, f.entry.slots[j].fields[0].name), i)
			}
			e.sizes[at] += n
		}
		size += len(f.tag) + prefixed(e.sizes[at])
	}
	return size, nil
}

// prefixed returns the size of n bytes plus the size of their length prefix.
func prefixed(n int) int { return varintLen(uint64(n)) + n }

func numberLen(wire protowire.Type, v uint64) int {
	switch wire {
	case protowire.Fixed32Type:
		return 4
	case protowire.Fixed64Type:
		return 8
	}
	return varintLen(v)
}
