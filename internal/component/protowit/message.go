package protowit

import (
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// MaxTypeSize is the maximum size of a message in linear memory, in bytes, without the contents of its lists and
// strings. Without this limit, a message that contains other messages hundreds of times could become unusably large.
const MaxTypeSize = 1 << 20

// Message converts the values of one message type between protobuf and flat bytes. It is immutable.
type Message struct {
	Desc protoreflect.MessageDescriptor
	// Type is the WIT type. It is usually a record. For a message without fields it is an enum with one case. For the
	// wrappers of google/protobuf/wrappers.proto it is the scalar itself.
	Type *wit.Type

	name   string // "hello-request", even if Type has no name
	slots  []slot
	fields []*field // sorted by number
	dense  []*field // indexed by number, for small numbers
}

type slotKind uint8

const (
	slotValue    slotKind = iota // a field without presence: always a value; the default is not sent
	slotOption                   // a field with presence: an option
	slotRequired                 // a required field: always a value
	slotList
	slotMap
	slotOneof // an option of a variant
)

// slot is a field of the WIT record. Slots are in the order of the flat bytes.
type slot struct {
	kind   slotKind
	fields []*field // one field; for a oneof, the fields of its cases
}

// field is a field of the protobuf message.
type field struct {
	number protowire.Number
	name   string // for errors
	kind   protoreflect.Kind
	wire   protowire.Type // wire type of one unpacked value
	op     op             // conversion of one value; opNone for messages
	multi  bool           // the value can be in several places of the input, because it is a list, a map or a message
	tag    []byte         // the encoded tag; for a packed list, the tag of the whole list
	endTag []byte         // for a group
	slot   int
	member int  // in a oneof, the index of the case
	list   bool // slotList
	packed bool // the list is written packed; both forms are read
	raw    bool // a message that stays serialized
	msg    *Message
	enum   *enum
	// For a map, entry is the message of one map entry. Slot 0 is the key, slot 1 is the value.
	entry *Message
}

// enum is an open enum. Each number that it declares has one case. All other numbers belong to the last case,
// "unrecognized".
type enum struct {
	typ     *wit.Type
	numbers []int32 // by case
	cases   map[int32]uint32
	dense   []uint32 // case+1, indexed by number, for small numbers
}

// denseLimit is the maximum length of tables that are indexed by number.
const denseLimit = 256

// lookup returns the field with number n, or nil.
func (m *Message) lookup(n protowire.Number) *field {
	if int(n) < len(m.dense) {
		return m.dense[n]
	}
	i, ok := slices.BinarySearchFunc(m.fields, n, func(f *field, n protowire.Number) int {
		return int(f.number) - int(n)
	})
	if !ok {
		return nil
	}
	return m.fields[i]
}

// request plans the request or response message of a method, and everything that the message contains.
func (p *witPackage) request(md protoreflect.MessageDescriptor) (*Message, error) {
	m, err := p.message(md)
	for err == nil && len(p.pending) > 0 {
		next := p.pending[0]
		p.pending = p.pending[1:]
		err = next()
	}
	return m, err
}

// message plans a message and everything that it contains, except the messages of raw fields. To plan a message is to
// create its slots and its WIT type.
func (p *witPackage) message(md protoreflect.MessageDescriptor) (*Message, error) {
	if m := p.messages[md.FullName()]; m != nil {
		return m, nil
	}
	m := &Message{Desc: md, name: p.typeName(md)}
	p.messages[md.FullName()] = m
	at := len(p.order)
	p.order = append(p.order, witType{})
	docs, err := p.plan(m)
	if err != nil {
		return nil, err
	}
	p.order[at] = witType{m.Type, md, docs}
	if m.Type.Name == "" {
		p.order[at].typ = nil
	}
	if size, _ := m.Type.Layout(); size > MaxTypeSize {
		return nil, fmt.Errorf("%s: a value with everything nested in it takes %d bytes, more than %d: %w", md.FullName(),
			size, MaxTypeSize, errdefs.ErrInvalidArgument)
	}
	return m, nil
}

// plan creates the slots and the WIT type of the message. The slots are ordered by field number; a oneof is at its
// lowest number.
func (p *witPackage) plan(m *Message) ([]protoreflect.Descriptor, error) {
	fds := fieldsByNumber(m.Desc)
	record := &wit.Type{Kind: wit.Record, Name: m.name}
	names := make(scope)
	var docs []protoreflect.Descriptor
	for _, fd := range fds {
		if od := fd.ContainingOneof(); od != nil && !od.IsSynthetic() {
			if fd != fieldsByNumber(od)[0] {
				continue
			}
			t, err := p.oneof(m, od)
			if err != nil {
				return nil, err
			}
			record.Fields = append(record.Fields, wit.Field{Name: names.name(kebab(string(od.Name()))), Type: t})
			docs = append(docs, od)
			continue
		}
		t, err := p.single(m, fd)
		if err != nil {
			return nil, err
		}
		record.Fields = append(record.Fields, wit.Field{Name: names.name(kebab(string(fd.Name()))), Type: t})
		docs = append(docs, fd)
	}
	m.index()
	switch {
	case isWrapper(m.Desc):
		m.Type = record.Fields[0].Type
	case len(fds) == 0:
		m.Type = &wit.Type{Kind: wit.Enum, Name: m.name, Cases: []wit.Case{{Name: "empty"}}}
		return []protoreflect.Descriptor{nil}, nil
	default:
		m.Type = record
	}
	return docs, nil
}

// index builds the tables that lookup uses.
func (m *Message) index() {
	slices.SortFunc(m.fields, func(a, b *field) int { return int(a.number) - int(b.number) })
	for _, f := range m.fields {
		if f.number >= denseLimit {
			break
		}
		for len(m.dense) <= int(f.number) {
			m.dense = append(m.dense, nil)
		}
		m.dense[f.number] = f
	}
}

func fieldsByNumber(of interface {
	Fields() protoreflect.FieldDescriptors
}) []protoreflect.FieldDescriptor {
	all := make([]protoreflect.FieldDescriptor, of.Fields().Len())
	for i := range all {
		all[i] = of.Fields().Get(i)
	}
	slices.SortFunc(all, func(a, b protoreflect.FieldDescriptor) int { return int(a.Number()) - int(b.Number()) })
	return all
}

var wrappers = map[protoreflect.FullName]bool{
	"google.protobuf.DoubleValue": true, "google.protobuf.FloatValue": true, "google.protobuf.Int64Value": true,
	"google.protobuf.UInt64Value": true, "google.protobuf.Int32Value": true, "google.protobuf.UInt32Value": true,
	"google.protobuf.BoolValue": true, "google.protobuf.StringValue": true, "google.protobuf.BytesValue": true,
}

// isWrapper reports whether a message has the name and the shape of one of the wrappers.
func isWrapper(md protoreflect.MessageDescriptor) bool {
	if !wrappers[md.FullName()] || md.Fields().Len() != 1 {
		return false
	}
	fd := md.Fields().Get(0)
	return fd.Number() == 1 && fd.Cardinality() == protoreflect.Optional && !fd.HasPresence()
}

// single plans a field outside any oneof.
func (p *witPackage) single(m *Message, fd protoreflect.FieldDescriptor) (*wit.Type, error) {
	f, t, err := p.field(m, m.Desc, fd)
	if err != nil {
		return nil, err
	}
	s := slot{fields: []*field{f}}
	switch {
	case fd.IsMap():
		s.kind = slotMap
		t = listOf(t)
	case fd.IsList():
		s.kind, f.list, f.packed = slotList, true, fd.IsPacked()
		t = listOf(t)
	case fd.Cardinality() == protoreflect.Required:
		s.kind = slotRequired
	case fd.HasPresence():
		s.kind = slotOption
		t = optionOf(t)
	}
	m.slots = append(m.slots, s)
	return t, nil
}

// oneof plans the fields of a oneof as the cases of a variant.
func (p *witPackage) oneof(m *Message, od protoreflect.OneofDescriptor) (*wit.Type, error) {
	at := len(m.slots)
	m.slots = append(m.slots, slot{kind: slotOneof})
	v := &wit.Type{Kind: wit.Variant, Name: p.types.name(m.name + "-" + kebab(string(od.Name())))}
	index := len(p.order)
	p.order = append(p.order, witType{typ: v, from: od})
	names := make(scope)
	var docs []protoreflect.Descriptor
	for i, fd := range fieldsByNumber(od) {
		f, t, err := p.field(m, m.Desc, fd)
		if err != nil {
			return nil, err
		}
		f.slot, f.member = at, i
		m.slots[at].fields = append(m.slots[at].fields, f)
		v.Cases = append(v.Cases, wit.Case{Name: names.name(kebab(string(fd.Name()))), Type: t})
		docs = append(docs, fd)
	}
	p.order[index].docs = docs
	return optionOf(v), nil
}

// field plans one value of a field (for a list, one element; for a map, one entry) and returns the type of that value.
// The parameter parent is needed to find cycles. It is the message that contains the field or, for the key or value of
// a map entry, the message that contains the map.
func (p *witPackage) field(
	m *Message, parent protoreflect.MessageDescriptor, fd protoreflect.FieldDescriptor,
) (*field, *wit.Type, error) {
	f := &field{
		number: fd.Number(), name: string(fd.Name()), kind: fd.Kind(), slot: len(m.slots),
		wire: kinds[fd.Kind()].wire, op: kinds[fd.Kind()].op, multi: fd.IsList() || contained(fd) != nil || fd.IsMap(),
	}
	f.tag = protowire.AppendTag(nil, f.number, f.wire)
	if fd.IsPacked() {
		f.tag = protowire.AppendTag(nil, f.number, protowire.BytesType)
	}
	if f.wire == protowire.StartGroupType {
		f.endTag = protowire.AppendTag(nil, f.number, protowire.EndGroupType)
	}
	m.fields = append(m.fields, f)
	if fd.IsMap() {
		t, err := p.entry(f, fd)
		return f, t, err
	}
	switch fd.Kind() {
	case protoreflect.EnumKind:
		e, err := p.enum(fd.Enum())
		if err != nil {
			return nil, nil, err
		}
		f.enum = e
		return f, e.typ, nil
	case protoreflect.MessageKind, protoreflect.GroupKind:
		t, err := p.nested(f, parent, fd.Message())
		return f, t, err
	}
	return f, kinds[fd.Kind()].typ, nil
}

// nested plans the message of a field. If the field is raw, the message must be planned too, because its bytes are
// checked. In that case nested only adds the plan to p.pending, because the planning of the same message may still be
// in progress.
func (p *witPackage) nested(f *field, parent, md protoreflect.MessageDescriptor) (*wit.Type, error) {
	if f.raw = p.cycles.raw(parent, md); f.raw {
		p.pending = append(p.pending, func() (err error) {
			f.msg, err = p.message(md)
			return err
		})
		return bytesType, nil
	}
	msg, err := p.message(md)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.name, err)
	}
	f.msg = msg
	return msg.Type, nil
}

// entry plans a map. Each entry of the map is a tuple of two slots.
func (p *witPackage) entry(f *field, fd protoreflect.FieldDescriptor) (*wit.Type, error) {
	e := &Message{Desc: fd.Message(), name: f.name}
	f.entry = e
	t := &wit.Type{Kind: wit.Tuple}
	for _, part := range []protoreflect.FieldDescriptor{fd.MapKey(), fd.MapValue()} {
		pf, pt, err := p.field(e, fd.ContainingMessage(), part)
		if err != nil {
			return nil, err
		}
		t.Fields = append(t.Fields, wit.Field{Type: pt})
		// If the key or the value is missing from an entry, that part has the default of its type (0 for an enum). So
		// presence does not matter.
		e.slots = append(e.slots, slot{kind: slotValue, fields: []*field{pf}})
	}
	e.index()
	e.Type = t
	return t, nil
}

func (p *witPackage) enum(ed protoreflect.EnumDescriptor) (*enum, error) {
	if e := p.enums[ed.FullName()]; e != nil {
		return e, nil
	}
	e := &enum{
		typ:   &wit.Type{Kind: wit.Variant, Name: p.typeName(ed)},
		cases: make(map[int32]uint32),
	}
	p.enums[ed.FullName()] = e
	var all []string
	for i := range ed.Values().Len() {
		all = append(all, string(ed.Values().Get(i).Name()))
	}
	prefix, names := enumPrefix(string(ed.Name()), all), scope{}
	var docs []protoreflect.Descriptor
	for i, name := range all {
		v := ed.Values().Get(i)
		n := int32(v.Number())
		if _, alias := e.cases[n]; alias {
			continue
		}
		e.cases[n] = uint32(len(e.numbers))
		e.numbers = append(e.numbers, n)
		e.typ.Cases = append(e.typ.Cases, wit.Case{Name: names.name(kebab(name[len(prefix):]))})
		docs = append(docs, v)
	}
	e.typ.Cases = append(e.typ.Cases, wit.Case{Name: names.name("unrecognized"), Type: s32Type})
	p.order = append(p.order, witType{e.typ, ed, append(docs, nil)})
	e.index()
	return e, nil
}

func (e *enum) index() {
	for n, c := range e.cases {
		if n < 0 || n >= denseLimit {
			continue
		}
		for len(e.dense) <= int(n) {
			e.dense = append(e.dense, 0)
		}
		e.dense[n] = c + 1
	}
}

// caseOf returns the case for number n, or false if the enum does not declare that number.
func (e *enum) caseOf(n int32) (uint32, bool) {
	if n >= 0 && int(n) < len(e.dense) {
		c := e.dense[n]
		return c - 1, c != 0
	}
	c, ok := e.cases[n]
	return c, ok
}
