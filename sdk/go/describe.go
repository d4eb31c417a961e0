package tripodgrpc

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
)

// describe returns the names of the services and a serialized FileDescriptorSet with their files and all files that
// these import. The descriptors come from the generated code that is linked into the program.
func (s *Server) describe() (services []string, files []byte, err error) {
	services = s.names()
	if len(services) == 0 {
		return nil, nil, errors.New("the server has no services: register them before tripodgrpc.Serve")
	}
	var set descriptorpb.FileDescriptorSet
	seen := make(map[string]bool)
	for _, name := range services {
		found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name))
		if err != nil {
			return nil, nil, fmt.Errorf("service %s: its .proto file is not linked in (import the package that protoc-gen-go made from it): %w",
				name, err)
		}
		if _, ok := found.(protoreflect.ServiceDescriptor); !ok {
			return nil, nil, fmt.Errorf("service %s: the linked .proto files declare this name as something else", name)
		}
		addFile(&set, seen, found.ParentFile())
	}
	files, err = proto.MarshalOptions{Deterministic: true}.Marshal(&set)
	return services, files, err
}

// addFile adds a file after the files that it imports.
func addFile(set *descriptorpb.FileDescriptorSet, seen map[string]bool, file protoreflect.FileDescriptor) {
	if seen[file.Path()] || file.IsPlaceholder() { // placeholders: weak dependencies that are not linked in
		return
	}
	seen[file.Path()] = true
	for i := range file.Imports().Len() {
		addFile(set, seen, file.Imports().Get(i).FileDescriptor)
	}
	set.File = append(set.File, protodesc.ToFileDescriptorProto(file))
}
