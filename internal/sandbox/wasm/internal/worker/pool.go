package worker

import (
	"context"
	"sync"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// maxIdle is how many idle instances a pod keeps that reuses them.
const maxIdle = 8

// pool keeps idle instances of a pod that reuses them; the one used last is used next.
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

// keep is false when there is no room.
func (p *pool) keep(g *guest) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.idle) >= maxIdle {
		return false
	}
	p.idle = append(p.idle, g)
	return true
}

// close ends the idle ones, and those to come.
func (p *pool) close() {
	p.mu.Lock()
	idle := p.idle
	p.idle, p.closed = nil, true
	p.mu.Unlock()
	for _, g := range idle {
		g.Close()
	}
}

// get is an instance for one request.
func (s *server) get(ctx context.Context, limits workerapi.Limits) (*guest, error) {
	if limits.Reuse {
		if g := s.pool.take(); g != nil {
			return g, nil
		}
	}
	return s.pod.instantiate(ctx, limits)
}

// put gives an instance back after its request.
func (s *server) put(g *guest, limits workerapi.Limits) {
	if limits.Reuse && g.Alive() {
		g.stdio.flush()
		if s.pool.keep(g) {
			return
		}
	}
	g.Close()
}
