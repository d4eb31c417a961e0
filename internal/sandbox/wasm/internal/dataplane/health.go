package dataplane

import (
	"context"
	"maps"
	"slices"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
)

// Health implements the health service (grpc.health.v1, grpc/doc/health-checking.md) as an Invoker.
type Health struct {
	mu       sync.Mutex
	services map[string]bool
	serving  bool
	changed  chan struct{} // closed at the next change
}

// NewHealth returns a Health that reports SERVING for the server as a whole (the empty name) and for the given
// services.
func NewHealth(services ...string) *Health {
	h := &Health{services: map[string]bool{"": true}, serving: true, changed: make(chan struct{})}
	for _, s := range services {
		h.services[s] = true
	}
	return h
}

// SetServing sets the status of all services and notifies the watchers. A drain begins with SetServing(false).
func (h *Health) SetServing(serving bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.serving != serving {
		h.serving = serving
		close(h.changed)
		h.changed = make(chan struct{})
	}
}

// The values of HealthCheckResponse.ServingStatus.
const (
	healthServing        = 1
	healthNotServing     = 2
	healthServiceUnknown = 3
)

// state returns a service's status, and a channel that is closed when any status changes.
func (h *Health) state(service string) (status uint64, changed <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case !h.services[service]:
		return healthServiceUnknown, h.changed
	case h.serving:
		return healthServing, h.changed
	}
	return healthNotServing, h.changed
}

// Invoke implements Invoker.
func (h *Health) Invoke(ctx context.Context, m *Method, c Call) error {
	request, err := c.Receive()
	if err != nil {
		return err
	}
	service, err := healthService(request)
	if err != nil {
		return err
	}
	switch m.Desc.Name() {
	case "Watch":
		return h.watch(ctx, service, c)
	case "List":
		return c.Send(h.list())
	}
	status, _ := h.state(service)
	if status == healthServiceUnknown {
		return Errorf(codes.NotFound, "unknown service %q", service)
	}
	return c.Send(healthResponse(status))
}

// watch sends the current status of a service, and then each change.
func (h *Health) watch(ctx context.Context, service string, c Call) error {
	last := uint64(0)
	for {
		status, changed := h.state(service)
		if status != last {
			if err := c.Send(healthResponse(status)); err != nil {
				return err
			}
			last = status
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// list encodes a HealthListResponse: a map from service name to HealthCheckResponse.
func (h *Health) list() []byte {
	h.mu.Lock()
	names := slices.Sorted(maps.Keys(h.services))
	h.mu.Unlock()
	var b []byte
	for _, name := range names {
		status, _ := h.state(name)
		entry := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), name)
		entry = protowire.AppendBytes(protowire.AppendTag(entry, 2, protowire.BytesType), healthResponse(status))
		b = protowire.AppendBytes(protowire.AppendTag(b, 1, protowire.BytesType), entry)
	}
	return b
}

// healthService decodes a HealthCheckRequest, whose only field is service (1).
func healthService(b []byte) (service string, err error) {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return "", Errorf(codes.InvalidArgument, "HealthCheckRequest: %v", protowire.ParseError(n))
		}
		b = b[n:]
		if number == 1 && kind == protowire.BytesType {
			service, n = protowire.ConsumeString(b)
		} else {
			n = protowire.ConsumeFieldValue(number, kind, b)
		}
		if n < 0 {
			return "", Errorf(codes.InvalidArgument, "HealthCheckRequest: %v", protowire.ParseError(n))
		}
		b = b[n:]
	}
	return service, nil
}

// healthResponse encodes a HealthCheckResponse, whose only field is status (1).
func healthResponse(status uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), status)
}

// healthFile returns the descriptor of grpc.health.v1. It does not use the generated code, because that package imports
// grpc-go.
var healthFile = sync.OnceValue(func() protoreflect.FileDescriptor {
	field := func(name string, number int32, kind descriptorpb.FieldDescriptorProto_Type, of string) *descriptorpb.FieldDescriptorProto {
		f := &descriptorpb.FieldDescriptorProto{
			Name: &name, Number: &number, Type: &kind, Label: descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum(), JsonName: &name,
		}
		if of != "" {
			f.TypeName = proto.String(".grpc.health.v1." + of)
		}
		return f
	}
	message := func(name string, fields ...*descriptorpb.FieldDescriptorProto) *descriptorpb.DescriptorProto {
		return &descriptorpb.DescriptorProto{Name: &name, Field: fields}
	}
	method := func(name, in, out string, stream bool) *descriptorpb.MethodDescriptorProto {
		return &descriptorpb.MethodDescriptorProto{
			Name: &name, InputType: proto.String(".grpc.health.v1." + in), OutputType: proto.String(".grpc.health.v1." + out),
			ServerStreaming: &stream,
		}
	}
	status := &descriptorpb.EnumDescriptorProto{Name: proto.String("ServingStatus")}
	for i, name := range []string{"UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN"} {
		status.Value = append(status.Value, &descriptorpb.EnumValueDescriptorProto{Name: &name, Number: proto.Int32(int32(i))})
	}
	response := message("HealthCheckResponse",
		field("status", 1, descriptorpb.FieldDescriptorProto_TYPE_ENUM, "HealthCheckResponse.ServingStatus"))
	response.EnumType = []*descriptorpb.EnumDescriptorProto{status}
	statuses := field("statuses", 1, descriptorpb.FieldDescriptorProto_TYPE_MESSAGE, "HealthListResponse.StatusesEntry")
	statuses.Label = descriptorpb.FieldDescriptorProto_LABEL_REPEATED.Enum()
	list := message("HealthListResponse", statuses)
	entry := message("StatusesEntry", field("key", 1, descriptorpb.FieldDescriptorProto_TYPE_STRING, ""),
		field("value", 2, descriptorpb.FieldDescriptorProto_TYPE_MESSAGE, "HealthCheckResponse"))
	entry.Options = &descriptorpb.MessageOptions{MapEntry: proto.Bool(true)}
	list.NestedType = []*descriptorpb.DescriptorProto{entry}

	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: proto.String("grpc/health/v1/health.proto"), Package: proto.String("grpc.health.v1"), Syntax: proto.String("proto3"),
		MessageType: []*descriptorpb.DescriptorProto{
			message("HealthCheckRequest", field("service", 1, descriptorpb.FieldDescriptorProto_TYPE_STRING, "")),
			response, message("HealthListRequest"), list,
		},
		Service: []*descriptorpb.ServiceDescriptorProto{{
			Name: proto.String("Health"),
			Method: []*descriptorpb.MethodDescriptorProto{
				method("Check", "HealthCheckRequest", "HealthCheckResponse", false),
				method("List", "HealthListRequest", "HealthListResponse", false),
				method("Watch", "HealthCheckRequest", "HealthCheckResponse", true),
			},
		}},
	}, nil)
	if err != nil {
		panic(err) // a mistake in the literal above
	}
	return file
})

func healthMethods() []*Method { return Methods(healthFile().Services().ByName("Health")) }
