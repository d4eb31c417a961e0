package worker

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/grpcclient"
)

// Guests in the raw world call other servers by tripod:grpc/client (sdk/wit/tripod-grpc-client.wit). Their calls belong to
// the call that they serve.

// outCalls holds the calls of a guest to other servers, by number.
type outCalls struct {
	transport http.RoundTripper // nil if the pod may not call out
	last      uint32
	calls     map[uint32]*grpcclient.Call
}

// close ends all calls.
func (o *outCalls) close() {
	for _, c := range o.calls {
		c.Close()
	}
	o.calls = nil
}

// clientHost returns the host functions of tripod:grpc/client.
func clientHost() (funcs []engine.HostFunc) {
	type clientFunc func(*engine.HostCall, *grpcCall, *grpcclient.Call, *wit.Reader) ([]byte, error)
	call := []*wit.Type{protowit.U32Type}
	add := func(name string, params []*wit.Type, result *wit.Type, do clientFunc) {
		funcs = append(funcs, engine.HostFunc{
			Interface: protowit.ClientInterface, Name: name, Params: params, Result: result,
			Call: func(hc *engine.HostCall, args []byte) ([]byte, error) {
				c, ok := hc.Host().(*grpcCall)
				if !ok || c.call == nil {
					return nil, errNoCall
				}
				in := wit.NewReader(args)
				if name == protowit.ClientStart {
					return do(hc, c, nil, in)
				}
				number := in.U32()
				to := c.outgoing.calls[number]
				if to == nil {
					return nil, fmt.Errorf("there is no call %d", number)
				}
				if name == protowit.ClientClose {
					delete(c.outgoing.calls, number)
				}
				return do(hc, c, to, in)
			},
		})
	}
	add(protowit.ClientStart, []*wit.Type{protowit.RequestType}, protowit.StartedType, clientStart)
	add(protowit.ClientSend, append(call, protowit.BytesType), protowit.SendingType, clientSend)
	add(protowit.ClientFinish, call, nil, func(_ *engine.HostCall, _ *grpcCall, to *grpcclient.Call, _ *wit.Reader) ([]byte, error) {
		to.Finish()
		return nil, nil
	})
	add(protowit.ClientNext, call, protowit.EventType, clientNext)
	add(protowit.ClientTake, call, protowit.BytesType, clientTake)
	add(protowit.ClientEvents, call, protowit.U32Type, clientEvents)
	add(protowit.ClientClose, call, nil, func(_ *engine.HostCall, _ *grpcCall, to *grpcclient.Call, _ *wit.Reader) ([]byte, error) {
		to.Close()
		return nil, nil
	})
	return funcs
}

// clientStart implements start: func(request: request) -> result<u32, status>.
func clientStart(_ *engine.HostCall, c *grpcCall, _ *grpcclient.Call, in *wit.Reader) ([]byte, error) {
	request := readRequest(in)
	if err := in.Err(); err != nil {
		return nil, err
	}
	to, st := grpcclient.Start(c.raw.ctx, c.state, c.outgoing.transport, &request)
	if st != nil {
		return protowit.AppendStatus(wit.AppendCase(c.reply[:0], resultErr), rawStatus(st)), nil
	}
	if c.outgoing.calls == nil {
		c.outgoing.calls = map[uint32]*grpcclient.Call{}
	}
	c.outgoing.last++
	c.outgoing.calls[c.outgoing.last] = to
	return wit.AppendU32(wit.AppendCase(c.reply[:0], resultOK), c.outgoing.last), nil
}

func readRequest(in *wit.Reader) grpcclient.Request {
	r := grpcclient.Request{Target: in.String(), Timeout: -1}
	if in.Option() {
		r.Authority = in.String()
	}
	r.Method = in.String()
	if in.Option() {
		r.Timeout = time.Duration(min(in.U64(), 1<<62))
	}
	for range in.Len() {
		e := protowit.ReadEntry(in)
		if in.Err() != nil {
			break
		}
		r.Metadata = append(r.Metadata, grpcclient.Entry(e))
	}
	r.MaxReceive = in.U32()
	return r
}

func rawStatus(st *dataplane.Status) *protowit.Status {
	return &protowit.Status{Code: uint32(st.Code), Message: st.Message, Details: st.Details}
}

// clientSend implements send: func(call: u32, message: list<u8>) -> sending.
func clientSend(_ *engine.HostCall, c *grpcCall, to *grpcclient.Call, in *wit.Reader) ([]byte, error) {
	return wit.AppendCase(c.reply[:0], int(to.Send(in.Bytes()))), nil
}

// clientNext implements next: func(call: u32) -> event.
func clientNext(_ *engine.HostCall, c *grpcCall, to *grpcclient.Call, _ *wit.Reader) ([]byte, error) {
	e := to.Next()
	reply := wit.AppendCase(c.reply[:0], int(e.Kind))
	switch e.Kind {
	case grpcclient.Header:
		reply = appendMetadata(reply, e.Metadata)
	case grpcclient.Message:
		reply = wit.AppendU32(reply, uint32(e.Size))
	case grpcclient.End:
		reply = wit.AppendOption(reply, e.Status != nil)
		if e.Status != nil {
			reply = protowit.AppendStatus(reply, rawStatus(e.Status))
		}
		reply = appendMetadata(reply, e.Metadata)
	}
	return keep(&c.reply, reply), nil
}

// appendMetadata appends a list<entry>.
func appendMetadata(dst []byte, header http.Header) []byte {
	var entries []protowit.Entry
	for key, v := range dataplane.Metadata(header) {
		entries = append(entries, protowit.Entry{Key: key, Value: v})
	}
	dst = wit.AppendLen(dst, len(entries))
	for _, e := range entries {
		dst = wit.AppendBytes(wit.AppendString(dst, e.Key), e.Value)
	}
	return dst
}

// clientTake implements take: func(call: u32) -> list<u8>.
func clientTake(hc *engine.HostCall, c *grpcCall, to *grpcclient.Call, _ *wit.Reader) ([]byte, error) {
	hc.Renew() // as for messages of the guest's own client
	message, ok := to.Take()
	if !ok {
		return nil, errors.New("take was called without a message that next announced")
	}
	return keep(&c.reply, wit.AppendBytes(c.reply[:0], message)), nil
}

// clientEvents implements events: func(call: u32) -> u32.
func clientEvents(hc *engine.HostCall, c *grpcCall, to *grpcclient.Call, _ *wit.Reader) ([]byte, error) {
	number, err := hc.OpenChannel(func(wake func()) engine.Channel {
		to.Notify(wake)
		return clientReadiness{to}
	})
	if err != nil {
		return nil, err
	}
	return wit.AppendU32(c.reply[:0], number), nil
}

// clientReadiness is the descriptor that events returns.
type clientReadiness struct{ call *grpcclient.Call }

// Ready implements engine.Channel.
func (r clientReadiness) Ready(write bool) bool { return r.call.Ready(write) }

// Send implements engine.Channel.
func (clientReadiness) Send([]byte) error { return errReadiness }

// Receive implements engine.Channel.
func (clientReadiness) Receive() ([]byte, error) { return nil, errReadiness }

// Close implements engine.Channel.
func (r clientReadiness) Close() { r.call.Notify(nil) }

var _ engine.Channel = clientReadiness{}
