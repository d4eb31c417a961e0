package worker

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// Cases of result<…, status> in the flat encoding.
const (
	resultOK  = 0
	resultErr = 1
)

// buffers is a pool of buffers for the arguments and results of calls.
var buffers = sync.Pool{New: func() any { return new(buffer) }}

type buffer struct{ args, result, message []byte }

// maxPooled is the size, in bytes, of the largest buffer that is kept for the next call. An encoded message of the
// default maximum size fits into such a buffer.
const maxPooled = 5 << 20

func (b *buffer) free() {
	for _, s := range []*[]byte{&b.args, &b.result, &b.message} {
		if cap(*s) > maxPooled {
			*s = nil
		}
	}
	buffers.Put(b)
}

// Invoke implements dataplane.Invoker. It runs one call in one instance.
func (s *server) Invoke(ctx context.Context, m *dataplane.Method, c dataplane.Call) error {
	s.pod.counts.requests.Add(1)
	s.pod.counts.active.Add(1)
	defer s.pod.counts.active.Add(-1)
	method, limits := s.pod.code.bound[m], *s.limits.Load()
	b := buffers.Get().(*buffer)
	defer b.free()
	if s.pod.code.World == engine.WorldRaw {
		return s.invokeRaw(ctx, m, c, limits, b)
	}
	var err error
	if b.args, err = arguments(ctx, b.args[:0], method, c); err != nil {
		return s.received(err)
	}
	if _, ok := ctx.Deadline(); !ok && method.Reader == nil && method.Writer == nil {
		// This deadline is set after the arguments are encoded, so that the arguments do not contain it: the guest
		// would mistake it for the client's deadline.
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, limits.RequestTimeout)
		defer cancel()
	}
	return s.call(ctx, method, c, limits, b)
}

// arguments appends the parameters of a call to dst, in the flat encoding.
func arguments(ctx context.Context, dst []byte, m *boundMethod, c dataplane.Call) ([]byte, error) {
	dst = appendContext(ctx, dst, m.Procedure, c)
	if m.Reader != nil {
		dst = wit.AppendU32(dst, readerRep)
	} else {
		request, err := c.Receive()
		if err != nil {
			return dst, err
		}
		decoded, err := m.Request.Decode(dst, request)
		if err != nil {
			return dst, badMessage(err)
		}
		dst = decoded
	}
	if m.Writer != nil {
		dst = wit.AppendU32(dst, writerRep)
	}
	return dst, nil
}

// appendContext appends the parameter context of a call to dst, in the flat encoding.
func appendContext(ctx context.Context, dst []byte, procedure string, c dataplane.Call) []byte {
	about := protowit.Context{Method: procedure, Peer: c.Peer()}
	if deadline, ok := ctx.Deadline(); ok {
		left := uint64(max(time.Until(deadline), 0))
		about.Timeout = &left
	}
	for key, v := range dataplane.Metadata(c.RequestHeader()) {
		about.Metadata = append(about.Metadata, protowit.Entry{Key: key, Value: v})
	}
	return protowit.AppendContext(dst, &about)
}

// badMessage returns the status for a request that is not valid protobuf or is too large when decoded. The error
// includes the path of the field.
func badMessage(err error) *dataplane.Status {
	if errdefs.IsResourceExhausted(err) {
		return dataplane.Errorf(codes.ResourceExhausted, "request: %v", err)
	}
	return dataplane.Errorf(codes.InvalidArgument, "request: %v", err)
}

// call runs the guest and sends its response.
func (s *server) call(ctx context.Context, m *boundMethod, c dataplane.Call, limits workerapi.Limits, b *buffer) error {
	g, err := s.pool.get(ctx, limits)
	if err != nil {
		return s.failed(ctx, m.Procedure, err)
	}
	defer func() { s.pool.put(g, limits) }()
	g.call.begin(c)
	defer g.call.end()
	defer s.pod.profiler.Load().watch(g)()
	if b.result, err = g.Call(ctx, m.call, b.args, b.result[:0]); err != nil {
		return s.failed(ctx, m.Procedure, err)
	}
	if st := s.overriding(g); st != nil {
		return st
	}
	return s.answer(m, c, b)
}

// overriding returns the status that overrides the guest's result because a stream failed, or nil.
func (s *server) overriding(g *guest) *dataplane.Status {
	if g.call.status != nil && s.pod.alive.Err() != nil { // the end of the grace period broke the streams
		return failedStopping.status(nil)
	}
	return g.call.status
}

// answer returns the status in the guest's result, or sends the message in the result. If the method streams its
// responses, they have already been sent.
func (s *server) answer(m *boundMethod, c dataplane.Call, b *buffer) error {
	r := wit.NewReader(b.result)
	if r.Case(2) == resultErr {
		st := protowit.ReadStatus(r)
		if r.Err() != nil {
			return s.invalid(m.Procedure, r.Err())
		}
		return guestStatus(st)
	}
	if m.Writer != nil {
		return nil
	}
	message, err := m.Response.Encode(b.message[:0], r.Rest())
	if err != nil {
		return s.invalid(m.Procedure, err)
	}
	b.message = message
	return c.Send(message)
}

// guestStatus converts the status in a guest's error. An error with the code OK or an unknown code becomes Unknown.
func guestStatus(st protowit.Status) *dataplane.Status {
	if st.Code == uint32(codes.OK) || st.Code > uint32(codes.Unauthenticated) {
		return dataplane.Errorf(codes.Unknown, "the component returned an error with the invalid status code %d: %s", st.Code, st.Message)
	}
	status := &dataplane.Status{Code: codes.Code(st.Code), Message: st.Message}
	for _, d := range st.Details {
		status.Details = append(status.Details, append([]byte(nil), d...))
	}
	return status
}

// failed counts and logs a call whose guest failed, and returns the status for the client.
func (s *server) failed(ctx context.Context, procedure string, err error) *dataplane.Status {
	return s.pod.count(ctx, procedure, err).status(err)
}

// received returns the error for a request that could not be received: the pod's end breaks the streams.
func (s *server) received(err error) error {
	if s.pod.alive.Err() != nil {
		return failedStopping.status(nil)
	}
	return err
}

// invalid logs that a response cannot be encoded as protobuf, and returns the status for the client.
func (s *server) invalid(procedure string, err error) *dataplane.Status {
	s.pod.output.logLine(fmt.Sprintf("tripod: %s: response: %v", procedure, err))
	return dataplane.Errorf(codes.Internal, "the component's response is not valid")
}

var _ dataplane.Invoker = (*server)(nil)
