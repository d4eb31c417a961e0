package protowit

import (
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	// The well-known types are built in, so a descriptor set may omit them.
	_ "google.golang.org/protobuf/types/known/anypb"
	_ "google.golang.org/protobuf/types/known/apipb"
	_ "google.golang.org/protobuf/types/known/durationpb"
	_ "google.golang.org/protobuf/types/known/emptypb"
	_ "google.golang.org/protobuf/types/known/fieldmaskpb"
	_ "google.golang.org/protobuf/types/known/sourcecontextpb"
	_ "google.golang.org/protobuf/types/known/structpb"
	_ "google.golang.org/protobuf/types/known/timestamppb"
	_ "google.golang.org/protobuf/types/known/typepb"
	_ "google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// Schema describes what a component with gRPC services must export, and converts messages. It is immutable.
type Schema struct {
	// Methods are the methods of all services, in the order of the descriptors.
	Methods []*Method
	// Files are the descriptors, for reflection.
	Files *protoregistry.Files

	packages []*witPackage
}

// Method is one RPC.
type Method struct {
	Procedure string // "/greet.v1.Greeter/SayHello"
	Desc      protoreflect.MethodDescriptor

	// Interface and Function are the name of the function that the guest exports. Params and Result are its type:
	//
	//	unary          func(context, request) -> result<response, status>
	//	client stream  func(context, requests: borrow<reader>) -> result<response, status>
	//	server stream  func(context, request, replies: borrow<writer>) -> result<_, status>
	//	both streams   func(context, requests: borrow<reader>, replies: borrow<writer>) -> result<_, status>
	Interface, Function string
	Params              []*wit.Type
	Result              *wit.Type

	Request, Response *Message
	// Reader is the host resource from which the guest reads requests. Writer is the host resource to which the guest
	// writes replies. If a direction does not stream, its resource is nil. Methods of one service that stream the same
	// message share a resource.
	Reader, Writer *Stream
}

// Stream is a host resource with one method. A reader has the method "next", a writer has the method "send".
type Stream struct {
	Interface string // "proto:greet-v1/greeter-streams"
	Resource  string // "hello-request-reader"
	// Function is the method's name in the component model, "[method]hello-request-reader.next".
	Function string
	// Params and Result are the type of Function. WIT omits the first parameter, which is a borrowed handle of the
	// resource:
	//
	//	next: func() -> result<option<request>, status>
	//	send: func(message: response) -> result<_, status>
	Params []*wit.Type
	Result *wit.Type
	// Message is the type of the stream's messages.
	Message *Message
}

// Compile reads descriptors and prepares the conversion for the named services. The names are full names. Without
// names, Compile uses all services in files that no other file of the set imports. The set may omit
// google/protobuf/*.proto.
//
// If a service or an import is missing, a descriptor is invalid, or a type has more than [MaxTypeSize] bytes, Compile
// returns errdefs.ErrInvalidArgument. The error names the service, import, descriptor or type.
func Compile(set *descriptorpb.FileDescriptorSet, services ...string) (*Schema, error) {
	files, err := link(set)
	if err != nil {
		return nil, err
	}
	found, err := findServices(set, files, services)
	if err != nil {
		return nil, err
	}
	s := &Schema{Files: files}
	packages := make(map[protoreflect.FullName]*witPackage)
	for _, sd := range found {
		name := sd.ParentFile().Package()
		p := packages[name]
		if p == nil {
			p = newPackage(name)
			packages[name] = p
			s.packages = append(s.packages, p)
		}
		methods, err := p.addService(sd)
		if err != nil {
			return nil, err
		}
		s.Methods = append(s.Methods, methods...)
	}
	return s, nil
}

// Parse is like [Compile], but takes a serialized FileDescriptorSet, as written by protoc --descriptor_set_out.
func Parse(set []byte, services ...string) (*Schema, error) {
	fds, err := unmarshalSet(set)
	if err != nil {
		return nil, err
	}
	return Compile(fds, services...)
}

// ParseServices links a serialized FileDescriptorSet and returns its files and the services that [Parse] would choose,
// without preparing a conversion. Its errors are those of Parse.
func ParseServices(set []byte, services ...string) (*protoregistry.Files, []protoreflect.ServiceDescriptor, error) {
	fds, err := unmarshalSet(set)
	if err != nil {
		return nil, nil, err
	}
	files, err := link(fds)
	if err != nil {
		return nil, nil, err
	}
	found, err := findServices(fds, files, services)
	return files, found, err
}

func unmarshalSet(set []byte) (*descriptorpb.FileDescriptorSet, error) {
	var fds descriptorpb.FileDescriptorSet
	if err := proto.Unmarshal(set, &fds); err != nil {
		return nil, fmt.Errorf("descriptors: not a FileDescriptorSet: %v: %w", err, errdefs.ErrInvalidArgument)
	}
	return &fds, nil
}

// link resolves the files. It adds well-known files that are imported but missing.
func link(set *descriptorpb.FileDescriptorSet) (*protoregistry.Files, error) {
	all := slices.Clone(set.GetFile())
	have := make(map[string]bool)
	for _, f := range all {
		have[f.GetName()] = true
	}
	for i := 0; i < len(all); i++ {
		for _, path := range all[i].GetDependency() {
			if have[path] {
				continue
			}
			known, err := protoregistry.GlobalFiles.FindFileByPath(path)
			if err != nil || known.Package() != "google.protobuf" {
				return nil, fmt.Errorf("descriptors: %s imports %s, which is not in the set (protoc: --include_imports): %w",
					all[i].GetName(), path, errdefs.ErrInvalidArgument)
			}
			have[path] = true
			all = append(all, protodesc.ToFileDescriptorProto(known))
		}
	}
	files, err := protodesc.NewFiles(&descriptorpb.FileDescriptorSet{File: all})
	if err != nil {
		return nil, fmt.Errorf("descriptors: %v: %w", err, errdefs.ErrInvalidArgument)
	}
	return files, nil
}

func findServices(
	set *descriptorpb.FileDescriptorSet, files *protoregistry.Files, names []string,
) ([]protoreflect.ServiceDescriptor, error) {
	if len(names) == 0 {
		return rootServices(set, files)
	}
	var found []protoreflect.ServiceDescriptor
	for _, name := range names {
		d, err := files.FindDescriptorByName(protoreflect.FullName(name))
		sd, ok := d.(protoreflect.ServiceDescriptor)
		if err != nil || !ok {
			return nil, fmt.Errorf("descriptors: no service %q is defined: %w", name, errdefs.ErrInvalidArgument)
		}
		if !slices.Contains(found, sd) {
			found = append(found, sd)
		}
	}
	return found, nil
}

func rootServices(
	set *descriptorpb.FileDescriptorSet, files *protoregistry.Files,
) ([]protoreflect.ServiceDescriptor, error) {
	imported := make(map[string]bool)
	for _, f := range set.GetFile() {
		for _, path := range f.GetDependency() {
			imported[path] = true
		}
	}
	var found []protoreflect.ServiceDescriptor
	for _, f := range set.GetFile() {
		if imported[f.GetName()] {
			continue
		}
		fd, err := files.FindFileByPath(f.GetName())
		if err != nil {
			return nil, fmt.Errorf("descriptors: %v: %w", err, errdefs.ErrInvalidArgument)
		}
		for i := range fd.Services().Len() {
			found = append(found, fd.Services().Get(i))
		}
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("descriptors: no file in the set has a service (files that others import do not count): %w",
			errdefs.ErrInvalidArgument)
	}
	return found, nil
}
