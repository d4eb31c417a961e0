package router

import (
	"io"
	"sync"
	"sync/atomic"
)

// load counts the requests in flight by container.
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
			// A request that begins between these two lines is lost from the count. That costs at most one bad choice, and keeps
			// containers that are gone out of the map.
			l.counts.CompareAndDelete(container, n)
		}
	})
}

// heldBody is a request's body that stays open when an attempt reaches no container: a transport closes its body even then.
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

// countedBody is a response's body. Its close ends the request.
type countedBody struct {
	io.ReadCloser
	done func()
}

func (b *countedBody) Close() error {
	b.done()
	return b.ReadCloser.Close()
}

// serviceCache caches the services of containers, which never change: looking them up takes a lock.
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
