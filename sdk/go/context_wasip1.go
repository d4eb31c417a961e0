package tripodgrpc

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
)

// callContext is the context of a call. It ends at the client's deadline, when the client cancels, and when the call is
// over. It asks the host for cancellation only on demand: a watching goroutine starts with the first Done.
type callContext struct {
	context.Context
	cancel context.CancelFunc
	call   *rawCall
	watch  sync.Once
	err    error // what the host says, which knows of a deadline before the guest's timer
}

// newContext returns the context of a call with its metadata, peer and deadline; timeout < 0 means no deadline.
func newContext(call *rawCall, md metadata.MD, address string, timeout time.Duration) (ctx context.Context, end func()) {
	base := peer.NewContext(metadata.NewIncomingContext(context.Background(), md), &peer.Peer{Addr: clientAddr(address)})
	c := &callContext{call: call}
	if timeout >= 0 {
		c.Context, c.cancel = context.WithTimeout(base, timeout)
	} else {
		c.Context, c.cancel = context.WithCancel(base)
	}
	return c, c.cancel
}

// Done implements context.Context.
func (c *callContext) Done() <-chan struct{} {
	c.watch.Do(func() {
		if c.Context.Err() == nil {
			go c.wait()
		}
	})
	return c.Context.Done()
}

// Err implements context.Context. It also notices a cancellation without Done, for loops that only ask Err.
func (c *callContext) Err() error {
	if c.err != nil || c.Context.Err() == nil && c.ended() {
		return c.err
	}
	return c.Context.Err()
}

// ended reports whether the client no longer waits, and ends the context then.
func (c *callContext) ended() bool {
	if c.call.over {
		return true
	}
	switch c.call.ended() {
	case codes.OK:
		return false
	case codes.DeadlineExceeded:
		c.err = context.DeadlineExceeded
	default:
		c.err = context.Canceled
	}
	c.cancel()
	return true
}

// wait cancels the context when the client no longer waits.
func (c *callContext) wait() {
	events, err := c.call.events()
	if err != nil {
		return // the call is over
	}
	_ = events.Write(func(uintptr) bool { return c.ended() }) // fails at the end of the call
}

// clientAddr is a client's address, IP:port.
type clientAddr string

func (clientAddr) Network() string  { return "tcp" }
func (a clientAddr) String() string { return string(a) }
