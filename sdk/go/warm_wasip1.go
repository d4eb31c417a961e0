package tripodgrpc

import (
	"context"
	"fmt"
	"runtime"
	"time"
	"unsafe"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/anypb"
)

// warm is tripod:grpc/warm#warm: func() -> result<u32, string>.
//
//go:wasmexport tripod:grpc/warm@0.1.0#warm
func warm() unsafe.Pointer {
	s, err := server()
	if err == nil {
		err = runWarmups(context.Background())
	}
	if err != nil {
		return lowerText(err)
	}
	s.warmTypes()
	// Nothing is collected after this, so that requests find the spans, pools and stacks that the rehearsal leaves.
	runtime.GC()
	fillSpans()
	for range 2 { // the second one with what the first has freed
		rehearse()
	}
	return lowerReadings()
}

// kept keeps what fillSpans makes on the heap.
var kept any

// fillSpans makes an object of each small size, with and without pointers, so that the runtime has a span for the next one.
func fillSpans() {
	const classes, most = 8, 512 // the runtime's sizes up to most are multiples of classes
	for size := classes; size <= most; size += classes {
		kept = make([]byte, size)
		kept = make([]*byte, size/int(unsafe.Sizeof(uintptr(0))))
	}
	kept = nil
}

// maxWarmTypes bounds the message types that are made ready although no service mentions them, for example the contents
// of google.protobuf.Any. A program with more of them uses few in a request.
const maxWarmTypes = 1000

// warmTypes makes what protobuf makes at the first use of a message type.
func (s *Server) warmTypes() {
	seen := make(map[protoreflect.FullName]bool)
	for _, name := range s.names() {
		found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(name))
		if service, ok := found.(protoreflect.ServiceDescriptor); err == nil && ok {
			for i := range service.Methods().Len() {
				m := service.Methods().Get(i)
				warmMessage(m.Input(), seen)
				warmMessage(m.Output(), seen)
			}
		}
	}
	if protoregistry.GlobalTypes.NumMessages() > maxWarmTypes {
		return
	}
	protoregistry.GlobalTypes.RangeMessages(func(t protoreflect.MessageType) bool {
		warmMessage(t.Descriptor(), seen)
		return true
	})
}

// warmMessage makes a message type ready, and the types of its fields.
func warmMessage(d protoreflect.MessageDescriptor, seen map[protoreflect.FullName]bool) {
	if d == nil || seen[d.FullName()] {
		return
	}
	seen[d.FullName()] = true
	if t, err := protoregistry.GlobalTypes.FindMessageByName(d.FullName()); err == nil {
		use(t.New())
	}
	for i := range d.Fields().Len() {
		warmMessage(d.Fields().Get(i).Message(), seen)
	}
}

// use marshals and unmarshals an empty message. The methods of messages that protoc-gen-go has not made can panic.
func use(m protoreflect.Message) {
	defer func() { _ = recover() }()
	b, _ := proto.Marshal(m.Interface())
	_ = proto.Unmarshal(b, m.Interface())
	m.Range(func(protoreflect.FieldDescriptor, protoreflect.Value) bool { return true })
}

// rehearse serves a call that nobody makes, so that what each call needs is there: the types of the call's objects in
// the runtime's tables, memory of their sizes, a stack that is large enough.
func rehearse() {
	s := NewServer(ChainUnaryInterceptor(func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		timer, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Hour) // as handlers do that wait or call others
		defer cancel()
		_ = timer.Done()
		return next(ctx, request)
	}))
	s.RegisterService(&rehearsal, nil)
	for _, method := range []string{"/tripod.Rehearsal/Answer", "/tripod.Rehearsal/Fail"} {
		md := metadata.MD{"user-agent": {"grpc"}, "x-request-id": {"rehearsal"}}
		ctx, end := newContext(&rawCall{over: true}, md, "127.0.0.1:1", time.Hour)
		clockReadings += 2 // of the deadline and of the timer, which are gone when the call ends
		st := s.handle(ctx, method, nobody{})
		end()
		lowerStatus(st)
	}
	result.low, result.keep, result.details = lowResult{}, nil, nil
}

// rehearsal is the service of the calls that nobody makes. Its messages are of a type that grpc links in anyway.
var rehearsal = grpc.ServiceDesc{
	ServiceName: "tripod.Rehearsal",
	Methods: []grpc.MethodDesc{
		{MethodName: "Answer", Handler: rehearsed(func(ctx context.Context, name *anypb.Any) (proto.Message, error) {
			if md, ok := metadata.FromIncomingContext(ctx); ok {
				_ = grpc.SetHeader(ctx, metadata.Pairs("x-request-id", md.Get("x-request-id")[0]))
			}
			return &anypb.Any{TypeUrl: fmt.Sprintf("Hello, %s!", name.GetTypeUrl())}, nil
		})},
		{MethodName: "Fail", Handler: rehearsed(func(context.Context, *anypb.Any) (proto.Message, error) {
			st, err := status.New(codes.InvalidArgument, "rehearsal").WithDetails(&anypb.Any{})
			if err != nil {
				return nil, err
			}
			return nil, st.Err()
		})},
	},
}

// rehearsed is a handler as protoc-gen-go-grpc makes it.
func rehearsed(f func(context.Context, *anypb.Any) (proto.Message, error)) grpc.MethodHandler {
	return func(impl any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
		in := new(anypb.Any)
		if err := decode(in); err != nil {
			return nil, err
		}
		return interceptor(ctx, in, &grpc.UnaryServerInfo{Server: impl, FullMethod: "/tripod.Rehearsal/"},
			func(ctx context.Context, in any) (any, error) {
				return f(ctx, in.(*anypb.Any))
			})
	}
}

// nobody is the host of a call that nobody makes.
type nobody struct{}

func (nobody) receive(bool) ([]byte, error) { return []byte("\x0a\x05world"), nil }
func (nobody) send([]byte) error            { return nil }
func (nobody) sendHeader() error            { return nil }
func (nobody) setHeader(string, string)     {}
func (nobody) setTrailer(string, string)    {}
