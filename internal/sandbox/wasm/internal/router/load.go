package router

import (
	"io"
	"sync"
	"sync/atomic"
)

// load counts the requests under way by container.
type load struct {
	counts sync.Map // container → *atomic.Int64
}

func (l *load) of(container string) int64 {
	if n, ok := l.counts.Load(container); ok {
		return n.(*atomic.Int64).Load()
	}
	return 0
}

// begin counts a request until done, which may be called more than once.
func (l *load) begin(container string) (done func()) {
	n, _ := l.counts.LoadOrStore(container, new(atomic.Int64))
	count := n.(*atomic.Int64)
	count.Add(1)
	return sync.OnceFunc(func() {
		if count.Add(-1) == 0 {
			// A request that begins between the two lines is not seen by those after it. That costs a bad choice, and keeps
			// the map free of containers that are gone.
			l.counts.CompareAndDelete(container, n)
		}
	})
}

// heldBody is a request's body that survives an attempt that did not reach anybody: transports close what they are given.
type heldBody struct {
	io.ReadCloser
	live, read atomic.Bool
}

func (b *heldBody) Read(p []byte) (int, error) {
	b.read.Store(true)
	return b.ReadCloser.Read(p)
}

func (b *heldBody) Close() error {
	if b.live.Load() {
		return b.ReadCloser.Close()
	}
	return nil // the server closes it when the handler returns
}

// countedBody is a response's body whose end is the end of the request.
type countedBody struct {
	io.ReadCloser
	done func()
}

func (b *countedBody) Close() error {
	b.done()
	return b.ReadCloser.Close()
}

// serviceCache remembers what containers serve, which never changes: finding out takes a lock.
type serviceCache struct {
	byContainer sync.Map // container → []string
	size        atomic.Int64
}

// cachedContainers bounds the cache; containers come and go.
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
