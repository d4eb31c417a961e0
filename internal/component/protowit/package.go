package protowit

import (
	"fmt"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// Names that each WIT package itself uses. A service with one of these names gets the suffix "-service".
const (
	typesName = "types"
	worldName = "server"
)

// witPackage is the WIT package for a protobuf package: its services, and one interface with all types that they need.
type witPackage struct {
	proto    protoreflect.FullName
	name     string // "proto:greet-v1"
	items    scope  // names of interfaces and worlds
	types    scope  // type names in the interface "types"
	order    []witType
	messages map[protoreflect.FullName]*Message
	enums    map[protoreflect.FullName]*enum
	cycles   cycles
	pending  []func() error // plans the messages of raw fields
	services []*witService
}

// witType is a named type of the interface "types", with the descriptor from which it was made.
type witType struct {
	typ  *wit.Type
	from protoreflect.Descriptor
	docs []protoreflect.Descriptor // the descriptor of each field or case, or nil
}

type witService struct {
	desc     protoreflect.ServiceDescriptor
	name     string // name of the interface: "greeter"
	streams  string // name of the interface for the streams: "greeter-streams"
	methods  []*Method
	readers  []*Stream
	writers  []*Stream
	bySource map[string]*Stream
}

func newPackage(proto protoreflect.FullName) *witPackage {
	name := "proto:root"
	if proto != "" {
		name = "proto:" + kebab(string(proto))
	}
	return &witPackage{
		proto: proto, name: name,
		items: scope{typesName: true, worldName: true}, types: make(scope),
		messages: make(map[protoreflect.FullName]*Message), enums: make(map[protoreflect.FullName]*enum),
		cycles: make(cycles),
	}
}

// typeName returns the name of a message or enum in the interface "types": the name within the package. The name of a
// nested type includes the names of the messages around it. A type from another protobuf package has that package's
// name as a prefix.
func (p *witPackage) typeName(d protoreflect.Descriptor) string {
	full := string(d.FullName())
	if pkg := d.ParentFile().Package(); pkg == p.proto && pkg != "" {
		full = full[len(pkg)+1:]
	}
	return p.types.name(kebab(full))
}

// itemName assigns a name to an interface.
func (p *witPackage) itemName(wanted string) string {
	if wanted == typesName || wanted == worldName {
		wanted += "-service"
	}
	return p.items.name(wanted)
}

func (p *witPackage) addService(sd protoreflect.ServiceDescriptor) ([]*Method, error) {
	s := &witService{desc: sd, name: p.itemName(kebab(string(sd.Name()))), bySource: make(map[string]*Stream)}
	s.streams = p.itemName(s.name + "-streams")
	p.services = append(p.services, s)
	functions := make(scope)
	for i := range sd.Methods().Len() {
		md := sd.Methods().Get(i)
		m := &Method{
			Procedure: fmt.Sprintf("/%s/%s", sd.FullName(), md.Name()), Desc: md,
			Interface: p.name + "/" + s.name, Function: functions.name(kebab(string(md.Name()))),
		}
		var err error
		if m.Request, err = p.request(md.Input()); err != nil {
			return nil, fmt.Errorf("%s: request: %w", md.FullName(), err)
		}
		if m.Response, err = p.request(md.Output()); err != nil {
			return nil, fmt.Errorf("%s: response: %w", md.FullName(), err)
		}
		p.sign(s, m)
		s.methods = append(s.methods, m)
	}
	return s.methods, nil
}

// sign sets the parameters and the result of the function that implements the method.
func (p *witPackage) sign(s *witService, m *Method) {
	m.Params = []*wit.Type{ContextType}
	m.Result = &wit.Type{Kind: wit.Result, Err: StatusType}
	if m.Desc.IsStreamingClient() {
		m.Reader = p.stream(s, m.Request, "reader")
		m.Params = append(m.Params, m.Reader.Params[0])
	} else {
		m.Params = append(m.Params, m.Request.Type)
	}
	if m.Desc.IsStreamingServer() {
		m.Writer = p.stream(s, m.Response, "writer")
		m.Params = append(m.Params, m.Writer.Params[0])
	} else {
		m.Result.Ok = m.Response.Type
	}
}

func (p *witPackage) stream(s *witService, m *Message, kind string) *Stream {
	key := kind + " " + string(m.Desc.FullName())
	if st := s.bySource[key]; st != nil {
		return st
	}
	st := &Stream{Interface: p.name + "/" + s.streams, Resource: m.name + "-" + kind, Message: m}
	self := &wit.Type{Kind: wit.Borrow, Name: st.Interface + "#" + st.Resource}
	if kind == "reader" {
		st.Function = "[method]" + st.Resource + ".next"
		st.Params = []*wit.Type{self}
		st.Result = &wit.Type{Kind: wit.Result, Ok: optionOf(m.Type), Err: StatusType}
		s.readers = append(s.readers, st)
	} else {
		st.Function = "[method]" + st.Resource + ".send"
		st.Params = []*wit.Type{self, m.Type}
		st.Result = &wit.Type{Kind: wit.Result, Err: StatusType}
		s.writers = append(s.writers, st)
	}
	s.bySource[key] = st
	return st
}
