package protowit

import (
	"encoding/binary"
	"slices"
	"sync"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// MaxDepth is the maximum nesting depth of messages. Protobuf for C++ and Java has the same limit.
const MaxDepth = 100

// Expansion limits the flat size of a message, as a multiple of the message's serialized size. The limit is needed
// because absent fields take space too: a list of empty messages can become very large if the message has many fields.
// ExpansionFree bytes are allowed in addition.
const (
	Expansion     = 16
	ExpansionFree = 1 << 20
)

// Decode appends the flat value of the serialized message msg to dst. Errors are of type [*Error]. After an error, dst
// must not be used.
func (m *Message) Decode(dst, msg []byte) ([]byte, error) {
	if len(msg) > MaxMessage {
		return nil, &Error{Err: errSize}
	}
	d := decoders.Get().(*decoder)
	defer d.release()
	d.b = msg
	d.limit = len(dst) + ExpansionFree + Expansion*len(msg)
	dst = slices.Grow(dst, len(msg)+8*len(m.slots))
	dst, err := d.message(dst, m, record{end: len(msg)}, 0)
	if err != nil {
		return nil, whole(err)
	}
	return dst, nil
}

// decoder is the state of one conversion. Each message that is being read has a frame on two stacks: states and
// regions.
type decoder struct {
	b       []byte
	limit   int // maximum length of dst
	states  []state
	regions []region
	entries []entrySpan
	table   []uint32
}

// state holds the results of the first pass for one slot.
type state struct {
	set    bool
	member uint16 // which member of the oneof is set
	// For messages, lists and maps: the first and the last region that contain values. Each number is 1 + the index in
	// decoder.regions.
	first, last uint32
	// For numbers: the last value. For strings and bytes: start<<32 | end of the last value.
	bits uint64
}

// region is a part of the input that holds consecutive fields with the same number, including their tags.
type region struct{ start, end, next uint32 }

var decoders = sync.Pool{New: func() any { return new(decoder) }}

// release returns the decoder to the pool, unless a huge message has made the decoder large.
func (d *decoder) release() {
	const most = 1 << 16
	d.b = nil
	d.states, d.regions, d.entries = d.states[:0], d.regions[:0], d.entries[:0]
	if cap(d.states) <= most && cap(d.regions) <= most && cap(d.entries) <= most && len(d.table) <= most {
		decoders.Put(d)
	}
}

// push adds a frame for the states of a message, and returns the arguments for pop.
func (d *decoder) push(m *Message) (base, regions int) {
	base, regions = len(d.states), len(d.regions)
	d.states = slices.Grow(d.states, len(m.slots))[:base+len(m.slots)]
	clear(d.states[base:])
	return base, regions
}

func (d *decoder) pop(base, regions int) {
	d.states, d.regions = d.states[:base], d.regions[:regions]
}

// message converts a message that is contiguous in the input.
func (d *decoder) message(dst []byte, m *Message, r record, depth int) ([]byte, error) {
	base, regions := d.push(m)
	if err := d.index(m, base, r.start, r.end, depth); err != nil {
		return nil, err
	}
	dst, err := d.emit(dst, m, base, depth)
	d.pop(base, regions)
	return dst, err
}

// pieces converts a message that consists of all records of a field, concatenated.
func (d *decoder) pieces(dst []byte, m *Message, first uint32, depth int) ([]byte, error) {
	base, regions := d.push(m)
	for c := d.cursor(first); c.next(); {
		if err := d.index(m, base, c.record.start, c.record.end, depth); err != nil {
			return nil, err
		}
	}
	dst, err := d.emit(dst, m, base, depth)
	d.pop(base, regions)
	return dst, err
}

// cursor iterates over the records of a field.
type cursor struct {
	d        *decoder
	region   uint32 // the next region
	pos, end int
	record   record
}

func (d *decoder) cursor(first uint32) cursor { return cursor{d: d, region: first} }

// next reads a record. It cannot fail, because the first pass has checked the record.
func (c *cursor) next() bool {
	if c.pos >= c.end {
		if c.region == 0 {
			return false
		}
		r := c.d.regions[c.region-1]
		c.region, c.pos, c.end = r.next, int(r.start), int(r.end)
	}
	n, wire, pos, err := tag(c.d.b, c.pos)
	if err == nil {
		c.record, c.pos, err = read(c.d.b, n, wire, pos)
	}
	return err == nil
}

// index is the first pass over the bytes of a message, or over one piece of a message.
func (d *decoder) index(m *Message, base, start, end, depth int) error {
	if depth > MaxDepth {
		return errDepth
	}
	b := d.b[:end]
	for pos := start; pos < end; {
		at := pos
		n, wire, after, err := tag(b, pos)
		if err == nil && n > protowire.MaxValidNumber {
			err = errFieldNumber
		}
		if err != nil {
			return err
		}
		var r record
		f := m.lookup(n)
		if r, pos, err = read(b, n, wire, after); err != nil {
			if f != nil {
				return within(err, f.name)
			}
			return err
		}
		if f == nil || !f.takes(wire) {
			continue // an unknown field, which is dropped
		}
		if err := d.save(m, f, base, depth, r, at, pos); err != nil {
			return err
		}
	}
	return nil
}

// takes reports whether the field accepts records of the given wire type. Records of other wire types count as unknown
// fields.
func (f *field) takes(wire protowire.Type) bool {
	return wire == f.wire || f.list && f.packable() && wire == protowire.BytesType
}

func (f *field) packable() bool {
	return f.wire != protowire.BytesType && f.wire != protowire.StartGroupType
}

// save saves the value of a field in the field's state. The record of the field is at [at, end) of the input.
func (d *decoder) save(m *Message, f *field, base, depth int, r record, at, end int) error {
	i := base + f.slot
	if s := &d.states[i]; s.set && int(s.member) != f.member {
		// Another member of the oneof was set before. That member is replaced, but must have been well-formed.
		old := m.slots[f.slot].fields[s.member]
		if old.msg != nil {
			if err := d.check(old.msg, s.first, depth+1, true); err != nil {
				return within(err, old.name)
			}
		}
		d.states[i] = state{}
	}
	s := &d.states[i]
	s.set, s.member = true, uint16(f.member)
	switch {
	case f.multi:
		d.extend(s, at, end)
	case f.op == opString:
		if !utf8.Valid(d.b[r.start:r.end]) {
			return within(errUTF8, f.name)
		}
		s.bits = uint64(r.start)<<32 | uint64(r.end)
	case f.op == opBytes:
		s.bits = uint64(r.start)<<32 | uint64(r.end)
	default:
		s.bits = r.bits
	}
	return nil
}

// extend adds a record to the regions of a slot. If the record follows directly after the last region, extend makes
// that region longer.
func (d *decoder) extend(s *state, at, end int) {
	if s.last != 0 && d.regions[s.last-1].end == uint32(at) {
		d.regions[s.last-1].end = uint32(end)
		return
	}
	d.regions = append(d.regions, region{start: uint32(at), end: uint32(end)})
	n := uint32(len(d.regions))
	if s.last == 0 {
		s.first = n
	} else {
		d.regions[s.last-1].next = n
	}
	s.last = n
}

// emit is the second pass. It writes the slots in order.
func (d *decoder) emit(dst []byte, m *Message, base, depth int) ([]byte, error) {
	if len(m.slots) == 0 {
		return wit.AppendCase(dst, 0), nil // an enum with one case
	}
	if len(dst) > d.limit {
		return nil, errExpansion
	}
	for i := range m.slots {
		s, st := &m.slots[i], d.states[base+i]
		f := s.fields[st.member]
		var err error
		switch s.kind {
		case slotList:
			dst, err = d.list(dst, f, st.first, depth)
		case slotMap:
			dst, err = d.mapping(dst, f, st.first, depth)
		default:
			dst, err = d.single(dst, s.kind, f, st, depth)
		}
		if err != nil {
			return nil, within(err, f.name)
		}
	}
	return dst, nil
}

// single writes a slot that has at most one value.
func (d *decoder) single(dst []byte, kind slotKind, f *field, st state, depth int) ([]byte, error) {
	switch kind {
	case slotOption, slotOneof:
		dst = wit.AppendOption(dst, st.set)
		if !st.set {
			return dst, nil
		}
		if kind == slotOneof {
			dst = wit.AppendCase(dst, f.member)
		}
	case slotRequired:
		if !st.set {
			return nil, errRequired
		}
	}
	if !f.multi {
		return d.scalar(dst, f, record{bits: st.bits, start: int(st.bits >> 32), end: int(uint32(st.bits))}), nil
	}
	if f.raw {
		return d.raw(dst, f, st.first, depth)
	}
	return d.pieces(dst, f.msg, st.first, depth+1)
}

// raw copies the pieces of a message that stays serialized. Concatenated, the pieces are the merged message.
func (d *decoder) raw(dst []byte, f *field, first uint32, depth int) ([]byte, error) {
	if err := d.check(f.msg, first, depth+1, false); err != nil {
		return nil, err
	}
	at := len(dst)
	dst = wit.AppendLen(dst, 0)
	for c := d.cursor(first); c.next(); {
		dst = append(dst, d.b[c.record.start:c.record.end]...)
	}
	binary.LittleEndian.PutUint32(dst[at:], uint32(len(dst)-at-4))
	return dst, nil
}

// list writes the elements of a list. A record of a packed list can hold any number of elements.
func (d *decoder) list(dst []byte, f *field, first uint32, depth int) ([]byte, error) {
	at, n := len(dst), 0
	dst = wit.AppendLen(dst, 0)
	for c := d.cursor(first); c.next(); {
		var err error
		more := 0
		if c.record.wire == protowire.BytesType && f.packable() {
			dst, more, err = packed(dst, f, d.b[c.record.start:c.record.end])
		} else if dst, err = d.element(dst, f, c.record, depth); err == nil {
			more = 1
		}
		n += more
		if err != nil {
			return nil, element(err, n)
		}
	}
	binary.LittleEndian.PutUint32(dst[at:], uint32(n))
	return dst, nil
}

// element writes one element of an unpacked list.
func (d *decoder) element(dst []byte, f *field, r record, depth int) ([]byte, error) {
	switch {
	case f.raw:
		if err := d.checkOne(f.msg, r, depth+1, false); err != nil {
			return nil, err
		}
		return wit.AppendBytes(dst, d.b[r.start:r.end]), nil
	case f.msg != nil:
		return d.message(dst, f.msg, r, depth+1)
	case f.op == opString && !utf8.Valid(d.b[r.start:r.end]):
		return nil, errUTF8
	}
	return d.scalar(dst, f, r), nil
}
