package worker

import (
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wasihttp"
	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
)

// hostPackage is the prefix of the interfaces that gRPC components can import besides the streams of their services.
const hostPackage = "tripod:grpc/"

// Resource handles of a call's streams. A call has at most one stream in each direction.
const (
	readerRep = 1
	writerRep = 2
)

// maxMetadata bounds the metadata of a response, in bytes; most clients accept less by default. entryOverhead is the
// number of bytes that RFC 9113, 6.5.2 adds to each field.
const (
	maxMetadata   = 256 << 10
	entryOverhead = 32
)

var errMetadata = fmt.Errorf("metadata of the response has more than %d bytes: %w", maxMetadata, errdefs.ErrResourceExhausted)

var errNoCall = errors.New("the current call has no such stream")

// grpcCall is the state that the host functions of a gRPC component's instance share: the call in progress.
type grpcCall struct {
	state *wasi.State
	call  dataplane.Call // nil between calls
	// out is a buffer for messages in protobuf. reply is a buffer for the results of host functions, in the flat
	// encoding.
	out, reply []byte
	sent       bool // the header has been sent; later header metadata goes into the trailer
	metadata   int  // bytes of metadata that the guest has set
	// status is the first error from receiving, decoding or sending a message, or from setting metadata. It overrides the
	// guest's result.
	status *dataplane.Status
	raw    rawCall // in the raw world
	// outgoing are the guest's calls to other servers, in the raw world.
	outgoing outCalls
}

func (c *grpcCall) begin(call dataplane.Call) {
	*c = grpcCall{state: c.state, call: call, out: c.out, reply: c.reply, outgoing: outCalls{transport: c.outgoing.transport}}
}

// WASI implements wasihttp.Guest.
func (c *grpcCall) WASI() *wasi.State { return c.state }

func (c *grpcCall) end() { c.call = nil }

// maxKept is the size, in bytes, of the largest message or result whose memory is kept for the next one.
const maxKept = 64 << 10

// keep keeps the memory of b in a buffer of the call, unless it is large, and returns b.
func keep(buffer *[]byte, b []byte) []byte {
	if *buffer = b; cap(b) > maxKept {
		*buffer = nil
	}
	return b
}

// responseHost returns WASI and the functions for response metadata.
func responseHost() engine.Host {
	host := wasihttp.Host()
	host.Funcs = append(host.Funcs,
		metadataFunc(protowit.SetHeader, func(c *grpcCall) http.Header {
			if c.sent {
				return c.call.ResponseTrailer()
			}
			return c.call.ResponseHeader()
		}),
		metadataFunc(protowit.SetTrailer, func(c *grpcCall) http.Header { return c.call.ResponseTrailer() }),
	)
	return host
}

// grpcHost returns the host functions that components with the given schema can import: WASI, response metadata, and
// the streams of the schema's methods.
func grpcHost(s *protowit.Schema) engine.Host {
	host := responseHost()
	known := map[*protowit.Stream]bool{nil: true}
	for _, m := range s.Methods {
		if !known[m.Reader] {
			known[m.Reader] = true
			addStream(&host, m.Reader, next(m.Reader.Message))
		}
		if !known[m.Writer] {
			known[m.Writer] = true
			addStream(&host, m.Writer, send(m.Writer.Message))
		}
	}
	return host
}

// addStream adds a stream's resource and its only method.
func addStream(h *engine.Host, s *protowit.Stream, f hostFunc) {
	h.Resources = append(h.Resources, engine.HostResource{Interface: s.Interface, Name: s.Resource})
	h.Funcs = append(h.Funcs, engine.HostFunc{Interface: s.Interface, Name: s.Function, Params: s.Params, Result: s.Result, Call: withCall(f)})
}

// hostFunc implements a host function that needs a call in progress.
type hostFunc func(c *grpcCall, args *wit.Reader) ([]byte, error)

func withCall(f hostFunc) func(*engine.HostCall, []byte) ([]byte, error) {
	return func(hc *engine.HostCall, args []byte) ([]byte, error) {
		c, ok := hc.Host().(*grpcCall)
		if !ok || c.call == nil {
			return nil, errNoCall
		}
		hc.Renew() // each message gets a new budget of host calls
		return f(c, wit.NewReader(args))
	}
}

// metadataFunc returns the host function set-header or set-trailer. These functions cannot return an error, so invalid
// metadata fails the call when the guest has returned, as in grpc-go with INTERNAL.
func metadataFunc(name string, to func(*grpcCall) http.Header) engine.HostFunc {
	return engine.HostFunc{
		Interface: protowit.ResponseInterface, Name: name, Params: []*wit.Type{protowit.EntryType},
		Call: func(hc *engine.HostCall, args []byte) ([]byte, error) {
			c, ok := hc.Host().(*grpcCall)
			if !ok || c.call == nil {
				return nil, errNoCall
			}
			r := wit.NewReader(args)
			entry := protowit.ReadEntry(r)
			if r.Err() != nil {
				return nil, r.Err()
			}
			if c.metadata += len(entry.Key) + len(entry.Value) + entryOverhead; c.metadata > maxMetadata {
				return nil, errMetadata // a trap, because the guest may never stop
			}
			if err := dataplane.SetMetadata(to(c), entry.Key, entry.Value); err != nil {
				c.override(dataplane.Errorf(codes.Internal, "the component's response: %v", err))
			}
			return nil, nil
		},
	}
}

// next implements a reader's func() -> result<option<message>, status>. It blocks until the client's next message.
func next(m *protowit.Message) hostFunc {
	return func(c *grpcCall, args *wit.Reader) ([]byte, error) {
		if args.U32() != readerRep {
			return nil, errNoCall
		}
		message, err := c.call.Receive()
		if err == io.EOF {
			return wit.AppendOption(wit.AppendCase(c.reply[:0], resultOK), false), nil
		}
		if err != nil {
			return c.fail(err), nil
		}
		reply, err := m.Decode(wit.AppendOption(wit.AppendCase(c.reply[:0], resultOK), true), message)
		if err != nil {
			c.status = badMessage(err)
			return c.fail(c.status), nil
		}
		return keep(&c.reply, reply), nil
	}
}

// send implements a writer's func(message) -> result<_, status>. It blocks until the message fits the client's
// flow-control window.
func send(m *protowit.Message) hostFunc {
	return func(c *grpcCall, args *wit.Reader) ([]byte, error) {
		if args.U32() != writerRep {
			return nil, errNoCall
		}
		out, err := m.Encode(c.out[:0], args.Rest())
		if err != nil {
			return nil, fmt.Errorf("message of the response stream: %w", err)
		}
		c.sent = true
		if err := c.call.Send(keep(&c.out, out)); err != nil {
			return c.fail(err), nil
		}
		return wit.AppendCase(c.reply[:0], resultOK), nil
	}
}

// override makes st the call's status, whatever the guest returns. The first one counts.
func (c *grpcCall) override(st *dataplane.Status) {
	if c.status == nil {
		c.status = st
	}
}

// fail records err as the call's status, unless the call was canceled, and returns err as the encoded result
// error(status).
func (c *grpcCall) fail(err error) []byte {
	st, ok := errors.AsType[*dataplane.Status](err)
	if !ok {
		st = dataplane.Errorf(codes.Canceled, "%v", err)
	}
	if st.Code != codes.Canceled {
		c.override(st)
	}
	return keep(&c.reply, protowit.AppendStatus(wit.AppendCase(c.reply[:0], resultErr), rawStatus(st)))
}
