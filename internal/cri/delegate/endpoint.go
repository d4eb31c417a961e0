package delegate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	// awayInterval is the pause between two probes of an endpoint that is away.
	awayInterval = time.Second
	// upInterval is the longest pause between two probes of an endpoint, and the age at which its lists are refreshed.
	upInterval = 10 * time.Second
	// kickPause collects the reasons for probes that follow each other closely.
	kickPause = 50 * time.Millisecond
)

// endpoint is the connection to one CRI endpoint.
type endpoint struct {
	Endpoint
	runtime, images *grpc.ClientConn
	log             *slog.Logger
	kicked          chan struct{}

	mu sync.Mutex
	// away is the reason why the endpoint does not answer; nil if it does.
	away error
	// orders is the context of the forwarded orders. It ends when the endpoint is away for too long.
	orders context.Context
	giveUp context.CancelFunc
	// running counts the sandboxes that are being made.
	running int
	// clock counts the beginnings and ends of orders that create something.
	clock     uint64
	created   map[*listing]uint64
	snapshots map[*listing]snapshot
	unary     map[*listing]bool              // the endpoint lacks the list's streaming call
	metrics   []*runtimeapi.MetricDescriptor // nil until the endpoint was asked
}

func newEndpoint(c Endpoint, maxSize int, log *slog.Logger) (*endpoint, error) {
	e := &endpoint{
		Endpoint: c, log: log, kicked: make(chan struct{}, 1),
		created: map[*listing]uint64{}, snapshots: map[*listing]snapshot{}, unary: map[*listing]bool{},
	}
	e.orders, e.giveUp = context.WithCancel(context.Background())
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithIdleTimeout(0),
		// Attempts to connect are more frequent than probes. ResetConnectBackoff before each probe would race with grpc's own calls: it
		// iterates over the connections without a lock (1.85).
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: awayInterval / 2},
			MinConnectTimeout: c.Timeout,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxSize), grpc.MaxCallSendMsgSize(maxSize)),
	}
	var err error
	if e.runtime, err = grpc.NewClient("unix://"+c.Runtime, options...); err != nil {
		return nil, fmt.Errorf("delegate %s: %w", c.Name, err)
	}
	e.images = e.runtime
	if c.Images != c.Runtime {
		if e.images, err = grpc.NewClient("unix://"+c.Images, options...); err != nil {
			return nil, errors.Join(fmt.Errorf("delegate %s: %w", c.Name, err), e.runtime.Close())
		}
	}
	return e, nil
}

func (e *endpoint) close() error {
	e.mu.Lock()
	e.giveUp()
	e.mu.Unlock()
	err := e.runtime.Close()
	if e.images != e.runtime {
		err = errors.Join(err, e.images.Close())
	}
	return err
}

func (e *endpoint) conn(method string) *grpc.ClientConn {
	if strings.HasPrefix(method, "/"+runtimeapi.ImageService_ServiceDesc.ServiceName+"/") {
		return e.images
	}
	return e.runtime
}

// read forwards a call that changes nothing. If the endpoint does not answer within its timeout, or cannot be reached,
// it is away.
func (e *endpoint) read(ctx context.Context, method string, req proto.Message) (proto.Message, error) {
	var reply proto.Message
	err := e.ask(ctx, func(ctx context.Context) (err error) {
		reply, err = e.invoke(ctx, method, req)
		return err
	})
	return reply, err
}

// ask runs a read within the endpoint's timeout.
func (e *endpoint) ask(ctx context.Context, read func(context.Context) error) error {
	if err := e.reason(); err != nil {
		return err
	}
	callers, bounded := ctx.Deadline()
	patient := !bounded || time.Until(callers) > e.Timeout // the endpoint's timeout ends first
	limited, cancel := context.WithTimeout(ctx, e.Timeout)
	defer cancel()
	err := read(limited)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return err // the caller gave up
	case patient && (limited.Err() != nil || status.Code(err) == codes.DeadlineExceeded):
		return e.setAway(e.silence())
	case status.Code(err) == codes.Unavailable:
		return e.setAway(errors.New(status.Convert(err).Message()))
	}
	return err
}

// order forwards a call that changes something. It has the caller's deadline, and ends early only if the endpoint is
// away for longer than its lists may be used.
func (e *endpoint) order(ctx context.Context, method string, req proto.Message) (proto.Message, error) {
	if err := e.reason(); err != nil {
		return nil, err
	}
	e.mu.Lock()
	orders := e.orders
	e.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(orders, cancel)()
	reply, err := e.invoke(ctx, method, req)
	if err == nil {
		return reply, nil
	}
	if orders.Err() != nil {
		return nil, e.unavailable(fmt.Errorf("no answer for %s, and the outcome of the call is unknown", e.SnapshotMaxAge))
	}
	if status.Code(err) == codes.Unavailable {
		return nil, e.setAway(errors.New(status.Convert(err).Message()))
	}
	return nil, err
}

func (e *endpoint) invoke(ctx context.Context, method string, req proto.Message) (proto.Message, error) {
	reply, err := newReply(method)
	if err != nil {
		return nil, err
	}
	if err := e.conn(method).Invoke(ctx, method, req, reply); err != nil {
		return nil, err
	}
	return reply, nil
}

// newReply returns an empty response of a method, such as /runtime.v1.RuntimeService/Version.
func newReply(method string) (proto.Message, error) {
	return newMessage(method, protoreflect.MethodDescriptor.Output)
}

func newRequest(method string) (proto.Message, error) {
	return newMessage(method, protoreflect.MethodDescriptor.Input)
}

func newMessage(method string, which func(protoreflect.MethodDescriptor) protoreflect.MessageDescriptor) (proto.Message, error) {
	name := protoreflect.FullName(strings.ReplaceAll(strings.TrimPrefix(method, "/"), "/", "."))
	d, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
	if err != nil {
		return nil, fmt.Errorf("method %s: %w", method, err)
	}
	t, err := protoregistry.GlobalTypes.FindMessageByName(which(d.(protoreflect.MethodDescriptor)).FullName())
	if err != nil {
		return nil, fmt.Errorf("method %s: %w", method, err)
	}
	return t.New().Interface(), nil
}

// reason returns nil if the endpoint answers, or errdefs.ErrUnavailable with the reason.
func (e *endpoint) reason() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.away == nil {
		return nil
	}
	return e.unavailable(e.away)
}

func (e *endpoint) unavailable(reason error) error {
	return fmt.Errorf("delegate %s: %w: %w", e.Name, reason, errdefs.ErrUnavailable)
}

// silence is the reason of an endpoint that let a call run into the endpoint's timeout.
func (e *endpoint) silence() error {
	return fmt.Errorf("no answer within %s", e.Timeout)
}

// setAway records that the endpoint does not answer, and has it probed at once. It returns the error for the call.
func (e *endpoint) setAway(reason error) error {
	e.markAway(reason)
	e.kick()
	return e.unavailable(reason)
}

func (e *endpoint) markAway(reason error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.away == nil {
		e.log.Warn("the endpoint is away", "err", reason)
	}
	e.away = reason
}

func (e *endpoint) kick() {
	select {
	case e.kicked <- struct{}{}:
	default:
	}
}

// watch probes the endpoint until ctx ends: soon after each kick, and at intervals. After each answer it calls refresh.
func (e *endpoint) watch(ctx context.Context, refresh func()) {
	lastAnswer := time.Now()
	for ctx.Err() == nil {
		pause := upInterval
		if err := e.probe(ctx); err == nil {
			lastAnswer = time.Now()
			refresh()
		} else if pause = awayInterval; time.Since(lastAnswer) > e.SnapshotMaxAge {
			e.endOrders()
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		case <-e.kicked:
			select { // collect further reasons
			case <-ctx.Done():
			case <-time.After(kickPause):
			}
		}
	}
}

// probe asks for the endpoint's version and records whether it answered.
func (e *endpoint) probe(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, e.Timeout)
	defer cancel()
	reply := &runtimeapi.VersionResponse{}
	err := e.runtime.Invoke(limited, runtimeapi.RuntimeService_Version_FullMethodName, &runtimeapi.VersionRequest{}, reply,
		grpc.WaitForReady(true))
	if err != nil {
		reason := errors.New(status.Convert(err).Message())
		if status.Code(err) == codes.DeadlineExceeded {
			reason = e.silence()
		}
		e.markAway(reason)
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.away != nil {
		e.log.Info("the endpoint answers again", "runtime", reply.GetRuntimeName(), "version", reply.GetRuntimeVersion())
		clear(e.unary) // it may be a later version
		e.metrics = nil
	}
	e.away = nil
	return nil
}

// awaitAnswer returns once the endpoint answers.
func (e *endpoint) awaitAnswer(ctx context.Context) error {
	for e.reason() != nil {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(awayInterval):
		}
	}
	return nil
}

// endOrders ends the orders that an endpoint has left unanswered.
func (e *endpoint) endOrders() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.giveUp()
	e.orders, e.giveUp = context.WithCancel(context.Background())
}
