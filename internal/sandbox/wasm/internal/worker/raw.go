package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
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

// Guests in the raw world exchange protobuf bytes with the worker, which converts nothing (sdk/wit/tripod-grpc-raw.wit).

// rawGrace is how long a guest may go on after its call has ended by its deadline or its client. In this time it can
// notice that its context has ended and return, and so an instance that is reused survives.
const rawGrace = 100 * time.Millisecond

// rawCall is the part of a grpcCall that only guests in the raw world have.
type rawCall struct {
	ctx    context.Context // of the request, without rawGrace
	inbox  *inbox
	events *uint32     // the open descriptor of the guest's events; nil if there is none
	stop   func() bool // ends the wake-up of the guest at the end of ctx; nil before the guest asked for its events
}

// inbox holds what the client sends next. The first message of a client that sends only one is there when the call begins.
// Others are received by a goroutine, for guests that do not want to block.
type inbox struct {
	mu       sync.Mutex
	arriving chan struct{} // closed when the Receive in progress returns; nil if there is none
	wake     func()        // wakes the guest if it waits for its events; nil before it asked for them
	full     bool          // message or err is what the guest sees next
	message  []byte
	err      error
	// Used only by the guest's thread:
	told  bool        // receive has announced the message
	taken func() bool // whether the guest has got the message from the engine (engine.Exchange); nil once this inbox knows
}

// sync notes that the guest has got the message from the engine.
func (in *inbox) sync() {
	if in.taken == nil || !in.taken() {
		return
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	in.taken, in.message, in.full = nil, nil, false
}

// rawHost returns the host functions of the raw world.
func rawHost() engine.Host {
	host := responseHost()
	host.Funcs = append(host.Funcs, clientHost()...)
	for name, f := range map[string]struct {
		params []*wit.Type
		result *wit.Type
		call   func(*engine.HostCall, *grpcCall, *wit.Reader) ([]byte, error)
		role   engine.Role
	}{
		protowit.RawReceive:    {[]*wit.Type{protowit.BoolType}, protowit.ReceivedType, rawReceive, engine.RoleReceive},
		protowit.RawTake:       {nil, protowit.BytesType, rawTake, engine.RoleTake},
		protowit.RawSend:       {[]*wit.Type{protowit.BytesType}, protowit.DoneType, rawSend, engine.RoleSend},
		protowit.RawSendHeader: {nil, protowit.DoneType, rawSendHeader, 0},
		protowit.RawEnded:      {nil, protowit.EndedType, rawEnded, 0},
		protowit.RawEvents:     {nil, protowit.U32Type, rawEvents, 0},
	} {
		host.Funcs = append(host.Funcs, engine.HostFunc{
			Interface: protowit.RawInterface, Name: name, Params: f.params, Result: f.result, Role: f.role,
			Call: func(hc *engine.HostCall, args []byte) ([]byte, error) {
				c, ok := hc.Host().(*grpcCall)
				if !ok || c.call == nil {
					return nil, errNoCall
				}
				c.raw.inbox.sync()
				return f.call(hc, c, wit.NewReader(args))
			},
		})
	}
	return host
}

func rawSignature() engine.Signature {
	return engine.Signature{
		Interface: protowit.HandlerInterface, Name: protowit.Handle,
		Params: []*wit.Type{protowit.ContextType}, Result: protowit.DoneType,
	}
}

// invokeRaw runs one call of a guest in the raw world.
func (s *server) invokeRaw(ctx context.Context, m *dataplane.Method, c dataplane.Call, limits workerapi.Limits, b *buffer) error {
	in, x := new(inbox), engine.Exchange{}
	if !m.Desc.IsStreamingClient() { // so no guest waits for it, and none is needed if it never comes
		if in.message, in.err = c.Receive(); in.err != nil && in.err != io.EOF {
			return s.received(in.err)
		}
		in.full = true
	}
	if s.pod.code.engine.Path() == engine.PathCore && in.full && in.err == nil {
		b.message = wit.AppendBytes(b.message[:0], in.message)
		x.Message = b.message
	}
	b.args = appendContext(ctx, b.args[:0], m.Procedure, c)
	if _, ok := ctx.Deadline(); !ok && !m.Desc.IsStreamingClient() && !m.Desc.IsStreamingServer() {
		var cancel context.CancelFunc // set after the context is encoded, as for typed functions
		ctx, cancel = context.WithTimeout(ctx, limits.RequestTimeout)
		defer cancel()
	}
	g, err := s.pool.get(ctx, limits)
	if err != nil {
		return s.failed(ctx, m.Procedure, err)
	}
	defer func() { s.pool.put(g, limits) }()
	g.call.begin(c)
	g.call.raw = rawCall{ctx: ctx, inbox: in}
	defer g.call.endRaw()
	within, cancel := withGrace(ctx, rawGrace)
	defer cancel()
	if x.Message != nil {
		in.taken = g.Taken
		if !m.Desc.IsStreamingServer() {
			x.Sent = func(message []byte) { g.call.send(message) }
		}
	}
	defer s.pod.profiler.Load().watch(g)()
	if b.result, err = g.CallExchange(within, s.pod.code.handle, b.args, b.result[:0], x); err != nil {
		return s.failed(ctx, m.Procedure, err)
	}
	if st := s.overriding(g); st != nil {
		return st
	}
	r := wit.NewReader(b.result)
	if r.Case(2) == resultOK {
		return nil
	}
	st := protowit.ReadStatus(r)
	if r.Err() != nil {
		return s.invalid(m.Procedure, r.Err())
	}
	return guestStatus(st)
}

// withGrace returns a context that ends some time after ctx, with the same cause.
func withGrace(ctx context.Context, grace time.Duration) (context.Context, context.CancelFunc) {
	within, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(grace, func() { cancel(context.Cause(ctx)) })
		context.AfterFunc(within, func() { timer.Stop() })
	})
	return within, func() {
		stop()
		cancel(context.Canceled)
	}
}

// endRaw ends the call. It waits for the goroutine that receives, because the dataplane's Call is not valid afterwards.
func (c *grpcCall) endRaw() {
	if c.raw.stop != nil {
		c.raw.stop()
	}
	in := c.raw.inbox
	in.mu.Lock()
	arriving := in.arriving
	in.mu.Unlock()
	if arriving != nil {
		c.call.Interrupt()
		<-arriving
	}
	c.outgoing.close()
	c.end()
}

// rawReceive implements receive: func(wait: bool) -> result<received, status>.
func rawReceive(hc *engine.HostCall, c *grpcCall, args *wit.Reader) ([]byte, error) {
	wait, in := args.Bool(), c.raw.inbox
	arriving := in.start(c.call)
	if arriving != nil && wait {
		select {
		case <-arriving:
			arriving = nil
		case <-c.raw.ctx.Done():
		case <-hc.Context().Done():
			return nil, context.Cause(hc.Context())
		}
	}
	if arriving != nil {
		if st := c.raw.ended(); st != nil {
			return c.fail(st), nil
		}
		return wit.AppendCase(wit.AppendCase(c.reply[:0], resultOK), protowit.ReceivedPending), nil
	}
	if in.err == io.EOF {
		return wit.AppendCase(wit.AppendCase(c.reply[:0], resultOK), protowit.ReceivedEnd), nil
	}
	if in.err != nil {
		return c.fail(in.err), nil
	}
	in.told = true
	return wit.AppendU32(wit.AppendCase(wit.AppendCase(c.reply[:0], resultOK), protowit.ReceivedMessage), uint32(len(in.message))), nil
}

// start returns nil if the inbox is full. If not, it starts a goroutine that fills it and wakes the guest, and returns a
// channel that is closed then.
func (in *inbox) start(call dataplane.Call) <-chan struct{} {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.full || in.arriving != nil {
		return in.arriving
	}
	arriving := make(chan struct{})
	in.arriving = arriving
	go func() {
		message, err := call.Receive()
		in.mu.Lock()
		in.message, in.err, in.full, in.arriving = message, err, true, nil
		wake := in.wake
		in.mu.Unlock()
		close(arriving)
		if wake != nil {
			wake()
		}
	}()
	return arriving
}

// rawTake implements take: func() -> list<u8>.
func rawTake(hc *engine.HostCall, c *grpcCall, _ *wit.Reader) ([]byte, error) {
	hc.Renew() // each message gets a new budget
	in := c.raw.inbox
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.told {
		return nil, errors.New("take was called without a message that receive announced")
	}
	reply := keep(&c.reply, wit.AppendBytes(c.reply[:0], in.message))
	in.message, in.full, in.told = nil, false, false
	return reply, nil
}

// rawSend implements send: func(message: list<u8>) -> result<_, status>.
func rawSend(hc *engine.HostCall, c *grpcCall, args *wit.Reader) ([]byte, error) {
	hc.Renew()
	return c.send(args.Bytes()), nil
}

// send sends a response message, and returns the encoded result.
func (c *grpcCall) send(message []byte) []byte {
	c.sent = true
	return c.done(c.call.Send(message))
}

// rawSendHeader implements send-header: func() -> result<_, status>.
func rawSendHeader(_ *engine.HostCall, c *grpcCall, _ *wit.Reader) ([]byte, error) {
	c.sent = true
	return c.done(c.call.SendHeader()), nil
}

// done returns the encoded result of sending.
func (c *grpcCall) done(err error) []byte {
	if err != nil {
		return c.fail(err)
	}
	return wit.AppendCase(c.reply[:0], resultOK)
}

// ended returns why the client no longer waits, or nil while it does.
func (r *rawCall) ended() *dataplane.Status {
	switch r.ctx.Err() {
	case nil:
		return nil
	case context.DeadlineExceeded:
		return dataplane.Errorf(codes.DeadlineExceeded, "the request's deadline has passed")
	}
	return dataplane.Errorf(codes.Canceled, "the client no longer waits")
}

// rawEnded implements ended: func() -> option<status>.
func rawEnded(_ *engine.HostCall, c *grpcCall, _ *wit.Reader) ([]byte, error) {
	st := c.raw.ended()
	if st == nil {
		return wit.AppendOption(c.reply[:0], false), nil
	}
	return protowit.AppendStatus(wit.AppendOption(c.reply[:0], true), &protowit.Status{Code: uint32(st.Code), Message: st.Message}), nil
}

// rawEvents implements events: func() -> u32.
func rawEvents(hc *engine.HostCall, c *grpcCall, _ *wit.Reader) ([]byte, error) {
	if c.raw.events == nil {
		number, err := hc.OpenChannel(func(wake func()) engine.Channel {
			in := c.raw.inbox
			in.mu.Lock()
			in.wake = wake
			in.mu.Unlock()
			if c.raw.stop == nil {
				c.raw.stop = context.AfterFunc(c.raw.ctx, wake)
			}
			return &rawReadiness{c}
		})
		if err != nil {
			return nil, err
		}
		c.raw.events = &number
	}
	return wit.AppendU32(c.reply[:0], *c.raw.events), nil
}

// rawReadiness is the descriptor that events returns. It transfers nothing; a guest waits for it in poll_oneoff.
type rawReadiness struct{ guest *grpcCall }

var errReadiness = fmt.Errorf("the descriptor is for poll_oneoff only: %w", errdefs.ErrInvalidArgument)

// Ready implements engine.Channel.
func (r *rawReadiness) Ready(write bool) bool {
	c := r.guest
	c.raw.inbox.sync()
	return c.raw.ctx.Err() != nil || !write && c.raw.inbox.start(c.call) == nil
}

// Send implements engine.Channel.
func (r *rawReadiness) Send([]byte) error { return errReadiness }

// Receive implements engine.Channel.
func (r *rawReadiness) Receive() ([]byte, error) { return nil, errReadiness }

// Close implements engine.Channel.
func (r *rawReadiness) Close() { r.guest.raw.events = nil }

var _ engine.Channel = (*rawReadiness)(nil)
