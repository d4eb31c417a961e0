package dataplane

import (
	"net/http"
	"slices"
	"strings"
	"sync"

	"connectrpc.com/grpcreflect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/dynamicpb"
)

// reflectionPrefix is the path prefix of grpc.reflection.v1 and v1alpha.
const reflectionPrefix = "/grpc.reflection."

// newReflection returns the handler for server reflection (grpc/doc/server-reflection.md). It lists and describes every
// service that the port serves, like grpc-go: also health and reflection, which are the host's. Clients such as grpcurl
// describe all that they list.
func (h *grpcHandler) newReflection() http.Handler {
	names := append(serviceNames(h.Methods), serviceNames(healthMethods())...)
	names = append(names, grpcreflect.ReflectV1ServiceName, grpcreflect.ReflectV1AlphaServiceName)
	slices.Sort(names)
	names = slices.Compact(names) // a component can serve them itself
	reflector := grpcreflect.NewReflector(
		grpcreflect.NamerFunc(func() []string { return names }),
		grpcreflect.WithDescriptorResolver(resolver{h.Files}),
		grpcreflect.WithExtensionResolver(extensions{h.types(), h.Files}),
	)
	mux := http.NewServeMux()
	mux.Handle(grpcreflect.NewHandlerV1(reflector))
	mux.Handle(grpcreflect.NewHandlerV1Alpha(reflector))
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		h.unknownMethod(w, r, MediaType(r.Header))
	})
	return mux
}

// types returns a resolver for the component's messages and extensions. The resolver is empty if there are no
// descriptors.
func (h *grpcHandler) types() *dynamicpb.Types {
	if h.Files == nil {
		return dynamicpb.NewTypes(new(protoregistry.Files))
	}
	return dynamicpb.NewTypes(h.Files)
}

// resolver finds the descriptors of the component and of the host's services.
type resolver struct{ *protoregistry.Files }

func (r resolver) FindFileByPath(path string) (protoreflect.FileDescriptor, error) {
	if fd, err := r.Files.FindFileByPath(path); err == nil {
		return fd, nil
	}
	return hostFiles().FindFileByPath(path)
}

func (r resolver) FindDescriptorByName(name protoreflect.FullName) (protoreflect.Descriptor, error) {
	if d, err := r.Files.FindDescriptorByName(name); err == nil {
		return d, nil
	}
	return hostFiles().FindDescriptorByName(name)
}

// hostFiles returns the descriptors of the host's services.
var hostFiles = sync.OnceValue(func() *protoregistry.Files {
	files := new(protoregistry.Files)
	for _, fd := range []protoreflect.FileDescriptor{healthFile(), reflectionFile("v1"), reflectionFile("v1alpha")} {
		if err := files.RegisterFile(fd); err != nil {
			panic(err) // a mistake in the descriptors
		}
	}
	return files
})

// reflectionFile returns the descriptor of a version of grpc.reflection. The versions differ only in their names.
// grpcreflect has registered v1 under another name, because the generated code with the right one imports grpc-go.
func reflectionFile(version string) protoreflect.FileDescriptor {
	file, err := protoregistry.GlobalFiles.FindFileByPath("connectext/grpc/reflection/v1/reflection.proto")
	if err != nil {
		panic(err) // grpcreflect has changed
	}
	renamed := protodesc.ToFileDescriptorProto(file)
	text, err := protojson.Marshal(renamed)
	if err == nil {
		names := strings.NewReplacer("connectext.grpc.reflection.v1", "grpc.reflection."+version, "connectext/grpc/reflection/v1/",
			"grpc/reflection/"+version+"/")
		err = protojson.Unmarshal([]byte(names.Replace(string(text))), renamed)
	}
	if err == nil {
		file, err = protodesc.NewFile(renamed, nil)
	}
	if err != nil {
		panic(err)
	}
	return file
}

// extensions adds RangeExtensionsByMessage, which dynamicpb.Types lacks.
type extensions struct {
	*dynamicpb.Types
	files *protoregistry.Files
}

func (x extensions) RangeExtensionsByMessage(message protoreflect.FullName, yield func(protoreflect.ExtensionType) bool) {
	x.files.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		return rangeExtensions(f, message, yield)
	})
}

// declarer is a file or a message, which can declare extensions.
type declarer interface {
	Extensions() protoreflect.ExtensionDescriptors
	Messages() protoreflect.MessageDescriptors
}

func rangeExtensions(in declarer, message protoreflect.FullName, yield func(protoreflect.ExtensionType) bool) bool {
	for i := range in.Extensions().Len() {
		x := in.Extensions().Get(i)
		if x.ContainingMessage().FullName() == message && !yield(dynamicpb.NewExtensionType(x)) {
			return false
		}
	}
	for i := range in.Messages().Len() {
		if !rangeExtensions(in.Messages().Get(i), message, yield) {
			return false
		}
	}
	return true
}
