package protowit

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
)

// metadataPackage is the protobuf package for the messages of the metadata. In the metadata, messages have no names.
const metadataPackage = "metadata"

const metadataFile = "metadata.proto"

// descriptors makes one file with all messages, and one file for each package of services. The files use protobuf
// editions, because editions can express all field codings.
func (m *metadata) descriptors() (*descriptorpb.FileDescriptorSet, error) {
	messages := newFile(metadataFile, metadataPackage)
	for i := range m.messages {
		d, err := m.message(i)
		if err != nil {
			return nil, fmt.Errorf("message %d: %w", i, err)
		}
		messages.MessageType = append(messages.MessageType, d)
	}
	set := &descriptorpb.FileDescriptorSet{File: []*descriptorpb.FileDescriptorProto{messages}}
	files := make(map[string]*descriptorpb.FileDescriptorProto)
	for _, s := range m.services {
		pkg, name := "", s.name
		if dot := strings.LastIndexByte(name, '.'); dot >= 0 {
			pkg, name = name[:dot], name[dot+1:]
		}
		f := files[pkg]
		if f == nil {
			f = newFile("services/"+pkg+".proto", pkg)
			f.Dependency = []string{metadataFile}
			files[pkg] = f
			set.File = append(set.File, f)
		}
		d := &descriptorpb.ServiceDescriptorProto{Name: &name}
		for _, method := range s.methods {
			md, err := m.method(method)
			if err != nil {
				return nil, fmt.Errorf("method %q of %q: %w", method.name, s.name, err)
			}
			d.Method = append(d.Method, md)
		}
		f.Service = append(f.Service, d)
	}
	return set, nil
}

func newFile(name, pkg string) *descriptorpb.FileDescriptorProto {
	return &descriptorpb.FileDescriptorProto{
		Name: &name, Package: &pkg, Syntax: proto.String("editions"), Edition: descriptorpb.Edition_EDITION_2023.Enum(),
	}
}

func (m *metadata) method(method metaMethod) (*descriptorpb.MethodDescriptorProto, error) {
	request, err := m.typeName(method.request)
	if err != nil {
		return nil, err
	}
	response, err := m.typeName(method.response)
	if err != nil {
		return nil, err
	}
	if method.arity > 3 {
		return nil, fmt.Errorf("arity %d does not exist", method.arity)
	}
	return &descriptorpb.MethodDescriptorProto{
		Name: &method.name, InputType: &request, OutputType: &response,
		ServerStreaming: proto.Bool(method.arity&1 != 0), ClientStreaming: proto.Bool(method.arity&2 != 0),
	}, nil
}

func (m *metadata) typeName(i uint64) (string, error) {
	if i >= uint64(len(m.messages)) {
		return "", fmt.Errorf("message %d does not exist, there are %d", i, len(m.messages))
	}
	return fmt.Sprintf(".%s.Message%d", metadataPackage, i), nil
}

func (m *metadata) message(i int) (*descriptorpb.DescriptorProto, error) {
	d := &descriptorpb.DescriptorProto{Name: proto.String(fmt.Sprintf("Message%d", i))}
	for _, f := range m.messages[i].fields {
		if f.isScalar || f.compound != codingOneof {
			if err := m.field(d, f, -1); err != nil {
				return nil, fmt.Errorf("field %q: %w", f.name, err)
			}
			continue
		}
		if len(f.variants) == 0 {
			return nil, fmt.Errorf("the oneof %q has no members", f.name)
		}
		d.OneofDecl = append(d.OneofDecl, &descriptorpb.OneofDescriptorProto{Name: proto.String(snake(f.name))})
		for _, v := range f.variants {
			if err := m.field(d, v, len(d.OneofDecl)-1); err != nil {
				return nil, fmt.Errorf("member %q of the oneof %q: %w", v.name, f.name, err)
			}
		}
	}
	return d, nil
}

// Modes and compound codings.
const (
	modeImplicit = iota
	modePacked
	modeExplicit
	modeExpanded

	codingEnum    = 0
	codingMessage = 1
	codingOneof   = 8
)

// scalarKinds are the field types of scalar codings, indexed by kind. Kind 2 is a string that need not be UTF-8. Here,
// it becomes an ordinary string.
var scalarKinds = []descriptorpb.FieldDescriptorProto_Type{
	descriptorpb.FieldDescriptorProto_TYPE_BYTES, descriptorpb.FieldDescriptorProto_TYPE_STRING,
	descriptorpb.FieldDescriptorProto_TYPE_STRING, descriptorpb.FieldDescriptorProto_TYPE_BOOL,
	descriptorpb.FieldDescriptorProto_TYPE_INT32, descriptorpb.FieldDescriptorProto_TYPE_SINT32,
	descriptorpb.FieldDescriptorProto_TYPE_SFIXED32, descriptorpb.FieldDescriptorProto_TYPE_UINT32,
	descriptorpb.FieldDescriptorProto_TYPE_FIXED32, descriptorpb.FieldDescriptorProto_TYPE_INT64,
	descriptorpb.FieldDescriptorProto_TYPE_SINT64, descriptorpb.FieldDescriptorProto_TYPE_SFIXED64,
	descriptorpb.FieldDescriptorProto_TYPE_UINT64, descriptorpb.FieldDescriptorProto_TYPE_FIXED64,
	descriptorpb.FieldDescriptorProto_TYPE_FLOAT, descriptorpb.FieldDescriptorProto_TYPE_DOUBLE,
}

// field adds a field to a message. The parameter oneof is the index of the field's oneof, or -1.
func (m *metadata) field(d *descriptorpb.DescriptorProto, f metaField, oneof int) error {
	if f.number > 1<<29-1 {
		return fmt.Errorf("field number %d is too large", f.number)
	}
	fd := &descriptorpb.FieldDescriptorProto{
		Name: proto.String(snake(f.name)), Number: proto.Int32(int32(f.number)),
		Label: descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum(),
	}
	mode, err := m.fieldType(d, fd, f)
	if err != nil {
		return err
	}
	features := &descriptorpb.FeatureSet{}
	switch {
	case oneof >= 0:
		fd.OneofIndex = proto.Int32(int32(oneof))
	case mode == modePacked || mode == modeExpanded:
		fd.Label = descriptorpb.FieldDescriptorProto_LABEL_REPEATED.Enum()
		features.RepeatedFieldEncoding = descriptorpb.FeatureSet_EXPANDED.Enum()
		if mode == modePacked {
			features.RepeatedFieldEncoding = descriptorpb.FeatureSet_PACKED.Enum()
		}
	case mode == modeImplicit && fd.GetType() != descriptorpb.FieldDescriptorProto_TYPE_MESSAGE:
		features.FieldPresence = descriptorpb.FeatureSet_IMPLICIT.Enum()
	}
	fd.Options = &descriptorpb.FieldOptions{Features: features}
	d.Field = append(d.Field, fd)
	return nil
}

// fieldType sets the type of fd and returns the mode. If the field is an enum, fieldType declares the enum in the
// message d.
func (m *metadata) fieldType(
	d *descriptorpb.DescriptorProto, fd *descriptorpb.FieldDescriptorProto, f metaField,
) (mode uint64, err error) {
	if f.isScalar {
		if f.scalar/4 >= uint64(len(scalarKinds)) {
			return 0, fmt.Errorf("scalar coding %d does not exist", f.scalar)
		}
		fd.Type = scalarKinds[f.scalar/4].Enum()
		return f.scalar % 4, nil
	}
	switch f.compound / 4 {
	case codingEnum:
		e, err := enumDescriptor(f)
		if err != nil {
			return 0, err
		}
		fd.Type = descriptorpb.FieldDescriptorProto_TYPE_ENUM.Enum()
		fd.TypeName = proto.String(fmt.Sprintf(".%s.%s.%s", metadataPackage, d.GetName(), e.GetName()))
		d.EnumType = append(d.EnumType, e)
	case codingMessage:
		name, err := m.typeName(f.message)
		if err != nil {
			return 0, err
		}
		fd.Type, fd.TypeName = descriptorpb.FieldDescriptorProto_TYPE_MESSAGE.Enum(), &name
	default:
		return 0, fmt.Errorf("compound coding %d does not exist here", f.compound)
	}
	return f.compound % 4, nil
}

// enumDescriptor makes an enum from the variants. The enum is open if it has a value 0, and then this value comes
// first. All values get the enum's name as a prefix, because all enums of a message share one scope for their values.
// The names in WIT do not have the prefix.
func enumDescriptor(f metaField) (*descriptorpb.EnumDescriptorProto, error) {
	if len(f.variants) == 0 {
		return nil, fmt.Errorf("an enum has no values")
	}
	e := &descriptorpb.EnumDescriptorProto{Name: proto.String("Enum_" + snake(f.name))}
	prefix := strings.ToUpper(strings.ReplaceAll(kebab(e.GetName()), "-", "_")) + "_"
	seen := make(map[int32]bool)
	alias := false
	for _, v := range f.variants {
		n := int32(v.number)
		alias = alias || seen[n]
		seen[n] = true
		e.Value = append(e.Value, &descriptorpb.EnumValueDescriptorProto{
			Name: proto.String(prefix + strings.ToUpper(snake(v.name))), Number: &n,
		})
	}
	kind := descriptorpb.FeatureSet_CLOSED
	if seen[0] {
		kind = descriptorpb.FeatureSet_OPEN
		rank := func(v *descriptorpb.EnumValueDescriptorProto) int {
			if v.GetNumber() == 0 {
				return 0
			}
			return 1
		}
		slices.SortStableFunc(e.Value, func(a, b *descriptorpb.EnumValueDescriptorProto) int { return rank(a) - rank(b) })
	}
	e.Options = &descriptorpb.EnumOptions{Features: &descriptorpb.FeatureSet{EnumType: kind.Enum()}}
	if alias {
		e.Options.AllowAlias = proto.Bool(true)
	}
	return e, nil
}

// snake returns the protobuf name for a WIT name.
func snake(name string) string { return strings.ReplaceAll(name, "-", "_") }
