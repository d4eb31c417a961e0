package worker

import (
	"context"
	"sync"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// maxIdle bounds the idle instances that a pod keeps for reuse.
const maxIdle = 8

// pool is a stack of a pod's idle instances.
type pool struct {
	mu     sync.Mutex
	idle   []*guest
	closed bool
}

func (p *pool) take() *guest {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.idle)
	if n == 0 {
		return nil
	}
	g := p.idle[n-1]
	p.idle = p.idle[:n-1]
	return g
}

// keep adds an idle instance. It returns false if the pool is full or closed.
func (p *pool) keep(g *guest) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.idle) >= maxIdle {
		return false
	}
	p.idle = append(p.idle, g)
	return true
}

// close closes the idle instances. Afterwards, keep always returns false.
func (p *pool) close() {
	p.mu.Lock()
	idle := p.idle
	p.idle, p.closed = nil, true
	p.mu.Unlock()
	for _, g := range idle {
		g.Close()
	}
}

// get returns an instance for one request: an idle one if the limits allow reuse, otherwise a new one.
func (s *server) get(ctx context.Context, limits workerapi.Limits) (*guest, error) {
	if limits.Reuse {
		if g := s.pool.take(); g != nil {
			return g, nil
		}
	}
	return s.pod.instantiate(ctx, limits)
}

// put keeps an instance for reuse after its request, or closes it.
func (s *server) put(g *guest, limits workerapi.Limits) {
	if limits.Reuse && g.Alive() {
		g.stdio.flush()
		if s.pool.keep(g) {
			return
		}
	}
	g.Close()
}
