package dataplane

import (
	"net/http"
	"strings"

	"connectrpc.com/grpcreflect"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/dynamicpb"
)

// reflectionPrefix is the path prefix of grpc.reflection.v1 and v1alpha.
const reflectionPrefix = "/grpc.reflection."

// newReflection returns the handler for server reflection (grpc/doc/server-reflection.md).
func (h *grpcHandler) newReflection() http.Handler {
	names := append(serviceNames(h.Methods), serviceNames(healthMethods())...)
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

// resolver finds the descriptors of the component and of the health service.
type resolver struct{ *protoregistry.Files }

func (r resolver) FindFileByPath(path string) (protoreflect.FileDescriptor, error) {
	fd, err := r.Files.FindFileByPath(path)
	if err != nil && path == healthFile().Path() {
		return healthFile(), nil
	}
	return fd, err
}

func (r resolver) FindDescriptorByName(name protoreflect.FullName) (protoreflect.Descriptor, error) {
	d, err := r.Files.FindDescriptorByName(name)
	rest, isHealth := strings.CutPrefix(string(name), "grpc.health.v1.")
	if err == nil || !isHealth {
		return d, err
	}
	first, _, _ := strings.Cut(rest, ".")
	if s := healthFile().Services().ByName(protoreflect.Name(first)); s != nil {
		return s, nil
	}
	if m := healthFile().Messages().ByName(protoreflect.Name(first)); m != nil {
		return m, nil
	}
	return d, err
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
