package network

import (
	"context"
	"fmt"
	"sync"
)

// keyLocks holds one lock per key. CNI requires operations on one container ID to be serialised.
type keyLocks struct {
	mu   sync.Mutex
	held map[string]*keyLock
}

type keyLock struct {
	slot  chan struct{} // full while locked
	users int           // holder and waiters; the last to leave removes the entry
}

// lock waits until key is free or ctx ends. The returned function unlocks key.
func (l *keyLocks) lock(ctx context.Context, key string) (func(), error) {
	k := l.join(key)
	select {
	case k.slot <- struct{}{}:
		return func() { <-k.slot; l.leave(key, k) }, nil
	case <-ctx.Done():
		l.leave(key, k)
		return nil, fmt.Errorf("network of pod %s: waiting for another operation on it: %w", key, context.Cause(ctx))
	}
}

// try locks key if it is free. Otherwise it returns nil.
func (l *keyLocks) try(key string) (unlock func()) {
	k := l.join(key)
	select {
	case k.slot <- struct{}{}:
		return func() { <-k.slot; l.leave(key, k) }
	default:
		l.leave(key, k)
		return nil
	}
}

func (l *keyLocks) join(key string) *keyLock {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held == nil {
		l.held = map[string]*keyLock{}
	}
	k := l.held[key]
	if k == nil {
		k = &keyLock{slot: make(chan struct{}, 1)}
		l.held[key] = k
	}
	k.users++
	return k
}

func (l *keyLocks) leave(key string, k *keyLock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k.users--; k.users == 0 {
		delete(l.held, key)
	}
}
