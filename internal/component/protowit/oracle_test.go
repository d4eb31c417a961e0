package protowit_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// The oracle is google.golang.org/protobuf, which reads the same bytes, and a reader of flat values that knows
// docs/wit.md and descriptors, but none of the package's tables.

// oracleOptions express the package's decisions in terms of the Go implementation.
var oracleOptions = proto.UnmarshalOptions{DiscardUnknown: true, RecursionLimit: protowit.MaxDepth + 1}

// errOracle means that the oracle (v1.36) panicked, because a map entry contained its key twice, the second time with a
// wrong wire type ("cannot convert nil to map key").
var errOracle = errors.New("the oracle has panicked")

// parse returns the oracle's reading of a message.
func parse(md protoreflect.MessageDescriptor, b []byte) (m *dynamicpb.Message, err error) {
	defer func() {
		if p := recover(); p != nil {
			if !strings.Contains(fmt.Sprint(p), "cannot convert nil to map key") {
				panic(p)
			}
			err = errOracle
		}
	}()
	m = dynamicpb.NewMessage(md)
	return m, oracleOptions.Unmarshal(b, m)
}

// flatReader rebuilds messages from flat values.
type flatReader struct {
	*wit.Reader
	t testing.TB
}

// fromFlat reads one message. It also checks the bytes against the WIT type.
func fromFlat(t testing.TB, m *protowit.Message, flat []byte) *dynamicpb.Message {
	t.Helper()
	c := wit.NewReader(flat)
	c.Check(m.Type)
	if c.Err() != nil || len(c.Rest()) != 0 {
		t.Fatalf("the flat bytes are not a %v: %v, %d bytes left", m.Type, c.Err(), len(c.Rest()))
	}
	out := dynamicpb.NewMessage(m.Desc)
	r := flatReader{wit.NewReader(flat), t}
	r.message(out)
	if r.Err() != nil || len(r.Rest()) != 0 {
		t.Fatalf("the flat bytes are not a %s: %v, %d bytes left", m.Desc.FullName(), r.Err(), len(r.Rest()))
	}
	return out
}

func (r flatReader) message(m protoreflect.Message) {
	md := m.Descriptor()
	if md.Fields().Len() == 0 {
		r.Case(1)
		return
	}
	done := make(map[protoreflect.FullName]bool)
	for _, fd := range byNumber(md.Fields()) {
		od := fd.ContainingOneof()
		switch {
		case od != nil && !od.IsSynthetic():
			if !done[od.FullName()] && r.Option() {
				cases := byNumber(od.Fields())
				member := cases[r.Case(len(cases))]
				m.Set(member, r.value(m, member))
			}
			done[od.FullName()] = true
		case fd.IsMap():
			r.mapping(m, fd)
		case fd.IsList():
			list := m.NewField(fd).List()
			for range r.Len() {
				list.Append(r.element(fd, list.NewElement))
			}
			m.Set(fd, protoreflect.ValueOfList(list))
		case fd.Cardinality() == protoreflect.Required || !fd.HasPresence():
			m.Set(fd, r.value(m, fd))
		case r.Option():
			m.Set(fd, r.value(m, fd))
		}
	}
}

func (r flatReader) mapping(m protoreflect.Message, fd protoreflect.FieldDescriptor) {
	all := m.NewField(fd).Map()
	n := r.Len()
	for range n {
		key := r.element(fd.MapKey(), nil).MapKey()
		all.Set(key, r.elementOf(fd.ContainingMessage(), fd.MapValue(), all.NewValue))
	}
	if all.Len() != n {
		r.t.Fatalf("%s has %d entries, but %d different keys", fd.FullName(), n, all.Len())
	}
	m.Set(fd, protoreflect.ValueOfMap(all))
}

func byNumber(fds protoreflect.FieldDescriptors) []protoreflect.FieldDescriptor {
	var all []protoreflect.FieldDescriptor
	for i := range fds.Len() {
		all = append(all, fds.Get(i))
	}
	slices.SortFunc(all, func(a, b protoreflect.FieldDescriptor) int { return int(a.Number() - b.Number()) })
	return all
}

func (r flatReader) value(m protoreflect.Message, fd protoreflect.FieldDescriptor) protoreflect.Value {
	return r.element(fd, func() protoreflect.Value { return m.NewField(fd) })
}

func (r flatReader) element(fd protoreflect.FieldDescriptor, make func() protoreflect.Value) protoreflect.Value {
	return r.elementOf(fd.ContainingMessage(), fd, make)
}

func (r flatReader) elementOf(
	parent protoreflect.MessageDescriptor, fd protoreflect.FieldDescriptor, make func() protoreflect.Value,
) protoreflect.Value {
	switch fd.Kind() {
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(r.Bool())
	case protoreflect.Int32Kind, protoreflect.Sint32Kind, protoreflect.Sfixed32Kind:
		return protoreflect.ValueOfInt32(int32(r.U32()))
	case protoreflect.Uint32Kind, protoreflect.Fixed32Kind:
		return protoreflect.ValueOfUint32(r.U32())
	case protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Sfixed64Kind:
		return protoreflect.ValueOfInt64(int64(r.U64()))
	case protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
		return protoreflect.ValueOfUint64(r.U64())
	case protoreflect.FloatKind:
		return protoreflect.ValueOfFloat32(r.F32())
	case protoreflect.DoubleKind:
		return protoreflect.ValueOfFloat64(r.F64())
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(r.String())
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes(slices.Clone(r.Bytes()))
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(r.enum(fd.Enum()))
	}
	v := make()
	if parent.FullName() == "google.protobuf.Value" || reaches(fd.Message(), parent, nil) {
		if err := oracleOptions.Unmarshal(r.Bytes(), v.Message().Interface()); err != nil {
			r.t.Fatalf("%s: unmarshal the serialized message: %v", fd.FullName(), err)
		}
		return v
	}
	r.message(v.Message())
	return v
}

func (r flatReader) enum(ed protoreflect.EnumDescriptor) protoreflect.EnumNumber {
	var numbers []protoreflect.EnumNumber
	for i := range ed.Values().Len() {
		if n := ed.Values().Get(i).Number(); !slices.Contains(numbers, n) {
			numbers = append(numbers, n)
		}
	}
	if c := r.Case(len(numbers) + 1); c < len(numbers) {
		return numbers[c]
	}
	return protoreflect.EnumNumber(int32(r.U32()))
}

// reaches implements the rule for recursive messages in a slow way: whether one message can contain another.
func reaches(from, to protoreflect.MessageDescriptor, seen map[protoreflect.FullName]bool) bool {
	if from.FullName() == to.FullName() {
		return true
	}
	if seen == nil {
		seen = make(map[protoreflect.FullName]bool)
	}
	if seen[from.FullName()] || from.FullName() == "google.protobuf.Value" {
		return false
	}
	seen[from.FullName()] = true
	for i := range from.Fields().Len() {
		fd := from.Fields().Get(i)
		if fd.IsMap() {
			fd = fd.MapValue()
		}
		if md := fd.Message(); md != nil && reaches(md, to, seen) {
			return true
		}
	}
	return false
}

// verdict compares the package's reading of a message with the oracle's. It returns the difference, or "".
func verdict(t testing.TB, m *protowit.Message, in []byte) string {
	want, wantErr := parse(m.Desc, in)
	flat, err := m.Decode(nil, in)
	switch {
	case err != nil && wantErr != nil, wantErr == errOracle:
		return ""
	case err != nil && stricter(err):
		return ""
	case err != nil:
		return fmt.Sprintf("refused: %v; the oracle has %v", err, want)
	case wantErr != nil:
		return fmt.Sprintf("accepted; the oracle says %v", wantErr)
	}
	if got := fromFlat(t, m, flat); !proto.Equal(got, want) {
		return fmt.Sprintf("decoded\n%v\nwant\n%v", got, want)
	}
	out, err := m.Encode(nil, flat)
	if err != nil {
		return fmt.Sprintf("encode: %v", err)
	}
	back, err := parse(m.Desc, out)
	if err != nil {
		return fmt.Sprintf("the oracle cannot read what was encoded: %v", err)
	}
	if !proto.Equal(back, want) {
		return fmt.Sprintf("encoded\n%v\nwant\n%v", back, want)
	}
	again, err := m.Decode(nil, out)
	if err != nil || !slices.Equal(again, flat) {
		return fmt.Sprintf("decoding what was encoded gives another value (error %v)", err)
	}
	return ""
}
