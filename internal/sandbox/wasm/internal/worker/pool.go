package worker

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// maxIdle bounds the idle instances that a pod keeps for reuse.
const maxIdle = 8

// pool is a stack of a pod's idle instances. Each has a time at which it is closed.
type pool struct {
	pod *pod

	mu     sync.Mutex
	idle   []*guest
	timer  *time.Timer // for the instance that expires first; nil if there is none
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

// keep adds an idle instance. It returns false if the pool is full or closed, or the instance has expired.
func (p *pool) keep(g *guest) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	left := time.Until(g.expires)
	if p.closed || len(p.idle) >= maxIdle || left <= 0 {
		return false
	}
	p.idle = append(p.idle, g)
	if p.timer == nil {
		p.timer = time.AfterFunc(left, p.expire)
	}
	return true
}

// expire closes the instances that have expired, and waits for the next one.
func (p *pool) expire() {
	now := time.Now()
	var expired []*guest
	defer func() {
		for _, g := range expired {
			g.Close()
		}
	}()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.timer = nil
	p.idle = slices.DeleteFunc(p.idle, func(g *guest) bool {
		over := !now.Before(g.expires)
		if over {
			expired = append(expired, g)
		}
		return over
	})
	if len(p.idle) > 0 {
		first := slices.MinFunc(p.idle, func(a, b *guest) int { return a.expires.Compare(b.expires) })
		p.timer = time.AfterFunc(first.expires.Sub(now), p.expire)
	}
}

// close closes the idle instances. Afterwards, keep always returns false.
func (p *pool) close() {
	p.mu.Lock()
	idle := p.idle
	p.idle, p.closed = nil, true
	if p.timer != nil {
		p.timer.Stop()
		p.timer = nil
	}
	p.mu.Unlock()
	for _, g := range idle {
		g.Close()
	}
}

// get returns an instance for one request: an idle one if the limits allow reuse, otherwise a new one.
func (p *pool) get(ctx context.Context, limits workerapi.Limits) (*guest, error) {
	if limits.Reuse {
		for g := p.take(); g != nil; g = p.take() {
			if !g.Outdated() {
				return g, nil
			}
			g.Close()
		}
	}
	return p.pod.instantiate(ctx, limits)
}

// put keeps an instance for reuse after its request, or closes it.
func (p *pool) put(g *guest, limits workerapi.Limits) {
	g.served++
	g.expires = g.begun.Add(limits.ReuseAge)
	if limits.Reuse && g.served < limits.ReuseRequests && g.Alive() && !g.Outdated() {
		g.stdio.flush()
		if p.keep(g) {
			return
		}
	}
	g.Close()
}

// probe makes one instance, so that a component that cannot be instantiated fails at start and not at the first
// request.
func (p *pool) probe(limits workerapi.Limits) error {
	limits.Snapshot = workerapi.SnapshotNever // it is made later, so that the start does not wait
	g, err := p.get(p.pod.alive, limits)
	if err != nil {
		return startError(p.pod, err)
	}
	g.served-- // this was no request
	p.put(g, limits)
	return nil
}
