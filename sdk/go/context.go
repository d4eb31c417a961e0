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
// over. Most handlers only pass it on. So it makes what a cancellation needs, a timer among it, with the first Done, and
// Err asks the host.
type callContext struct {
	base     context.Context // metadata and peer
	call     client
	deadline time.Time // zero for none

	mu          sync.Mutex
	err         error           // why the context has ended
	root        *ending         // nil before the first Done
	cancellable context.Context // of root; package context knows it, and what is derived from it needs no goroutine
	cancel      context.CancelFunc
	timer       *time.Timer // for the deadline; nil if there is none
}

// ending is a context that ends with an error of choice, as those of package context cannot.
type ending struct {
	context.Context
	done  chan struct{}
	err   error
	after func()
}

func (e *ending) Done() <-chan struct{} { return e.done }

func (e *ending) Err() error { return e.err }

// AfterFunc is what package context looks for in a parent that is not its own.
func (e *ending) AfterFunc(f func()) (stop func() bool) {
	e.after = f
	return func() bool { e.after = nil; return true }
}

func (e *ending) end(why error) {
	if e.err != nil {
		return
	}
	e.err = why
	close(e.done)
	if e.after != nil {
		e.after()
	}
}

// client is the client of a call, as the host knows it.
type client interface {
	// gone returns why the client no longer waits, or OK while it does.
	gone() codes.Code
	// watch calls check until it returns true, now and whenever gone could return something else. It returns at the end of
	// the call, too.
	watch(check func() bool)
}

// newContext returns the context of a call with its metadata, peer and deadline; timeout < 0 means no deadline.
func newContext(call client, md metadata.MD, address string, timeout time.Duration) (ctx context.Context, end func()) {
	c := &callContext{base: peer.NewContext(metadata.NewIncomingContext(context.Background(), md), &peer.Peer{Addr: clientAddr(address)}),
		call: call}
	if timeout >= 0 {
		c.deadline = time.Now().Add(timeout)
	}
	return c, func() { c.end(context.Canceled) }
}

// Deadline implements context.Context.
func (c *callContext) Deadline() (time.Time, bool) { return c.deadline, !c.deadline.IsZero() }

// Value implements context.Context. Package context finds the parent of a derived context by a key of its own, after
// Done.
func (c *callContext) Value(key any) any {
	c.mu.Lock()
	from := c.cancellable
	c.mu.Unlock()
	if from == nil {
		from = c.base
	}
	return from.Value(key)
}

// Done implements context.Context.
func (c *callContext) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cancellable == nil {
		c.makeCancellable()
	}
	return c.cancellable.Done()
}

// makeCancellable is the first Done. The caller holds the lock.
func (c *callContext) makeCancellable() {
	c.root = &ending{Context: c.base, done: make(chan struct{})}
	c.cancellable, c.cancel = context.WithCancel(c.root)
	if c.err != nil {
		c.root.end(c.err)
		return
	}
	if !c.deadline.IsZero() {
		c.timer = time.AfterFunc(time.Until(c.deadline), func() { c.end(context.DeadlineExceeded) })
	}
	go c.call.watch(c.ended)
}

// Err implements context.Context. It also notices a cancellation without Done, for loops that only ask Err.
func (c *callContext) Err() error {
	if err := c.reason(); err != nil {
		return err
	}
	c.ended()
	return c.reason()
}

// reason returns why the context has ended, or nil.
func (c *callContext) reason() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// end ends the context, once.
func (c *callContext) end(why error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	c.err = why
	if c.root != nil {
		c.root.end(why)
		c.cancel()
	}
	if c.timer != nil {
		c.timer.Stop()
	}
}

// ended reports whether the client no longer waits, and ends the context then.
func (c *callContext) ended() bool {
	switch c.call.gone() { // the host knows of a deadline before the guest's timer
	case codes.OK:
		return false
	case codes.DeadlineExceeded:
		c.end(context.DeadlineExceeded)
	default:
		c.end(context.Canceled)
	}
	return true
}

// clientAddr is a client's address, IP:port.
type clientAddr string

func (clientAddr) Network() string  { return "tcp" }
func (a clientAddr) String() string { return string(a) }
