package delegate

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// events merges this node's events with those of all endpoints. If an endpoint's events end, the whole stream ends, so
// that the client lists all pods again and misses nothing. While an endpoint is away, the stream carries the events of
// the others; it ends once the endpoint is back.
func (r *Router) events(stream grpc.ServerStream, local func(grpc.ServerStream) error) error {
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	merged := &mergedEvents{ServerStream: stream, ctx: ctx}
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, e := range r.endpoints {
		wg.Go(func() { cancel(r.eventsOf(ctx, e, merged)) })
	}
	err := local(merged)
	if cause := context.Cause(ctx); stream.Context().Err() == nil && cause != nil {
		err = cause
	}
	cancel(err)
	return err
}

// eventsOf passes on an endpoint's events until they end, and returns why. If the endpoint has none, they are found by
// lists.
func (r *Router) eventsOf(ctx context.Context, e *endpoint, to *mergedEvents) error {
	method := runtimeapi.RuntimeService_GetContainerEvents_FullMethodName
	if e.reason() != nil {
		if err := e.awaitAnswer(ctx); err != nil {
			return err
		}
		return e.unavailable(errors.New("it answers again: subscribe and list again"))
	}
	from, err := e.open(ctx, method, &runtimeapi.GetEventsRequest{})
	for err == nil {
		event := &runtimeapi.ContainerEventResponse{}
		if err = from.RecvMsg(event); err == nil {
			err = to.SendMsg(event)
		}
	}
	if ctx.Err() == nil && status.Code(err) == codes.Unimplemented {
		return r.eventsByLists(ctx, e, to)
	}
	if ctx.Err() == nil {
		e.kick()
		return e.unavailable(fmt.Errorf("its events have ended: %s", status.Convert(err).Message()))
	}
	return ctx.Err()
}

// mergedEvents is a stream to which several goroutines send.
type mergedEvents struct {
	grpc.ServerStream
	ctx context.Context
	mu  sync.Mutex
	// began means that the header has been sent, by itself or before the first event.
	began bool
}

func (m *mergedEvents) Context() context.Context { return m.ctx }

func (m *mergedEvents) SendHeader(header metadata.MD) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.began {
		return nil
	}
	m.began = true
	return m.ServerStream.SendHeader(header)
}

func (m *mergedEvents) SendMsg(msg any) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.began = true
	return m.ServerStream.SendMsg(msg)
}
