package requests

import (
	"io"
	"sync"
	"sync/atomic"
)

// load counts, for each container, the requests in flight.
type load struct {
	counts sync.Map // container → *atomic.Int64
}

func (l *load) of(container string) int64 {
	if n, ok := l.counts.Load(container); ok {
		return n.(*atomic.Int64).Load()
	}
	return 0
}

// begin counts a request until the returned function is called. Further calls to that function do nothing.
func (l *load) begin(container string) (done func()) {
	n, _ := l.counts.LoadOrStore(container, new(atomic.Int64))
	count := n.(*atomic.Int64)
	count.Add(1)
	return sync.OnceFunc(func() {
		if count.Add(-1) == 0 {
			// A request that begins between these two lines is not counted, which can cause one bad choice. In return,
			// the map does not keep removed containers.
			l.counts.CompareAndDelete(container, n)
		}
	})
}

// retryBody is the request body of one attempt. It calls unread if the transport closes it after the request has been
// sent. A transport closes the body even if it cannot connect, but the next attempt needs the body.
type retryBody struct {
	io.ReadCloser
	unread             func()
	sent, read, closed atomic.Bool
}

func (b *retryBody) Read(p []byte) (int, error) {
	b.read.Store(true)
	return b.ReadCloser.Read(p)
}

func (b *retryBody) Close() error {
	b.closed.Store(true)
	if b.sent.Load() {
		b.unread()
	}
	return nil // the server closes the body when the handler returns
}

// markSent says that the request has been sent. The response can be complete by now, and the body closed.
func (b *retryBody) markSent() {
	b.sent.Store(true)
	if b.closed.Load() {
		b.unread()
	}
}

// countedBody is a response body that calls done on Close.
type countedBody struct {
	io.ReadCloser
	done func()
}

func (b *countedBody) Close() error {
	b.done()
	return b.ReadCloser.Close()
}

// serviceCache caches each container's services, because looking them up takes a lock. A container's services never
// change.
type serviceCache struct {
	byContainer sync.Map // container → []string
	size        atomic.Int64
}

// cachedContainers bounds the cache, which also keeps removed containers.
const cachedContainers = 4096

func (c *serviceCache) of(container string, find func(string) []string) []string {
	if known, ok := c.byContainer.Load(container); ok {
		return known.([]string)
	}
	services := find(container)
	if services == nil { // not known yet
		return nil
	}
	if c.size.Add(1) > cachedContainers {
		c.byContainer.Clear()
		c.size.Store(1)
	}
	c.byContainer.Store(container, services)
	return services
}

// bufferPool is an httputil.BufferPool.
type bufferPool struct{ pool *sync.Pool }

// Get implements httputil.BufferPool.
func (p bufferPool) Get() []byte { return p.pool.Get().(*[32 << 10]byte)[:] }

// Put implements httputil.BufferPool.
func (p bufferPool) Put(b []byte) { p.pool.Put((*[32 << 10]byte)(b)) }
