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
	l.mu.Lock()
	if l.held == nil {
		l.held = map[string]*keyLock{}
	}
	k := l.held[key]
	if k == nil {
		k = &keyLock{slot: make(chan struct{}, 1)}
		l.held[key] = k
	}
	k.users++
	l.mu.Unlock()

	select {
	case k.slot <- struct{}{}:
		return func() { <-k.slot; l.leave(key, k) }, nil
	case <-ctx.Done():
		l.leave(key, k)
		return nil, fmt.Errorf("network of pod %s: waiting for another operation on it: %w", key, context.Cause(ctx))
	}
}

func (l *keyLocks) leave(key string, k *keyLock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k.users--; k.users == 0 {
		delete(l.held, key)
	}
}
