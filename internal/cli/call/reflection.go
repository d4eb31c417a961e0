package call

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	reflection "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
)

func Services(ctx context.Context, c Client) ([]string, error) {
	resp, err := ask(ctx, c, &reflection.ServerReflectionRequest{MessageRequest: &reflection.ServerReflectionRequest_ListServices{}})
	if err != nil {
		return nil, err
	}
	var names []string
	for _, s := range resp.GetListServicesResponse().GetService() {
		names = append(names, s.Name)
	}
	slices.Sort(names)
	return names, nil
}

// Service gets the descriptor of a service from the server.
func Service(ctx context.Context, c Client, name string) (protoreflect.ServiceDescriptor, error) {
	resp, err := ask(ctx, c, &reflection.ServerReflectionRequest{
		MessageRequest: &reflection.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: name},
	})
	if err != nil {
		return nil, fmt.Errorf("service %s: %w", name, err)
	}
	var set descriptorpb.FileDescriptorSet
	for _, raw := range resp.GetFileDescriptorResponse().GetFileDescriptorProto() {
		var file descriptorpb.FileDescriptorProto
		if err := proto.Unmarshal(raw, &file); err != nil {
			return nil, fmt.Errorf("descriptor of %s: %w", name, err)
		}
		set.File = append(set.File, &file)
	}
	files, err := protodesc.FileOptions{AllowUnresolvable: true}.NewFiles(&set)
	if err != nil {
		return nil, fmt.Errorf("descriptors of %s: %w", name, err)
	}
	d, err := files.FindDescriptorByName(protoreflect.FullName(name))
	if service, ok := d.(protoreflect.ServiceDescriptor); ok && err == nil {
		return service, nil
	}
	return nil, fmt.Errorf("the server has no service %s: %w", name, errdefs.ErrNotFound)
}

// Method finds PACKAGE.SERVICE/METHOD; a dot before the method works too.
func Method(ctx context.Context, c Client, name string) (protoreflect.MethodDescriptor, error) {
	name = strings.TrimPrefix(name, "/")
	service, method, ok := strings.Cut(name, "/")
	if i := strings.LastIndexByte(name, '.'); !ok && i > 0 {
		service, method, ok = name[:i], name[i+1:], true
	}
	if !ok {
		return nil, fmt.Errorf("%q is not PACKAGE.SERVICE/METHOD: %w", name, errdefs.ErrInvalidArgument)
	}
	s, err := Service(ctx, c, service)
	if err != nil {
		return nil, err
	}
	if m := s.Methods().ByName(protoreflect.Name(method)); m != nil {
		return m, nil
	}
	var known []string
	for i := range s.Methods().Len() {
		known = append(known, string(s.Methods().Get(i).Name()))
	}
	return nil, fmt.Errorf("%s has no method %s, only %s: %w", service, method, strings.Join(known, ", "), errdefs.ErrNotFound)
}

// ask sends one request to the reflection service.
func ask(ctx context.Context, c Client, request *reflection.ServerReflectionRequest) (*reflection.ServerReflectionResponse, error) {
	m := reflection.File_grpc_reflection_v1_reflection_proto.Services().Get(0).Methods().Get(0)
	s, err := c.Open(ctx, m, nil)
	if err != nil {
		return nil, err
	}
	message := dynamicpb.NewMessage(m.Input())
	if err := convert(request, message); err != nil {
		return nil, err
	}
	if err := s.Send(message); err != nil {
		return nil, err
	}
	if err := s.CloseSend(); err != nil {
		return nil, err
	}
	reply, err := s.Receive()
	if err != nil {
		return nil, fmt.Errorf("server reflection: %w", err)
	}
	var resp reflection.ServerReflectionResponse
	if err := convert(reply, &resp); err != nil {
		return nil, err
	}
	if e := resp.GetErrorResponse(); e != nil {
		return nil, fmt.Errorf("server reflection: %s: %w", e.ErrorMessage, errdefs.ErrNotFound)
	}
	return &resp, nil
}

// convert copies a message between two Go types of the same protobuf type.
func convert(from, to proto.Message) error {
	raw, err := proto.Marshal(from)
	if err != nil {
		return err
	}
	return proto.Unmarshal(raw, to)
}
