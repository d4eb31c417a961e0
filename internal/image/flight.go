package image

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/tripod-run/tripod/internal/guard"
)

// flights merges concurrent requests for the same work into one, such as pulls of the same image (fault I8). T is the
// work's result.
type flights[T any] struct {
	log  *slog.Logger
	what string // the work, for messages and the metric of panics
	mu   sync.Mutex
	all  map[string]*flight[T]
	wg   sync.WaitGroup
}

func (fs *flights[T]) init(log *slog.Logger, what string) {
	fs.log, fs.what, fs.all = log, what, map[string]*flight[T]{}
}

// flight is one piece of work under way. It is cancelled once no caller waits for it.
type flight[T any] struct {
	cancel  context.CancelFunc
	waiters int
	tracker *tracker
	done    chan struct{}
	result  T
	err     error
}

// do joins the flight for the key, or starts a flight that calls run with a context derived from base. It waits until
// the flight or ctx ends.
func (fs *flights[T]) do(ctx, base context.Context, key string, onProgress func(Progress),
	run func(context.Context, *tracker) (T, error)) (T, error) {
	f := fs.join(base, key, run)
	defer fs.leave(key, f)
	defer f.tracker.subscribe(onProgress)()
	select {
	case <-f.done:
		return f.result, f.err
	case <-ctx.Done():
		var none T
		return none, fmt.Errorf("stopped waiting for the %s: %w", fs.what, context.Cause(ctx))
	}
}

func (fs *flights[T]) join(base context.Context, key string, run func(context.Context, *tracker) (T, error)) *flight[T] {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if f := fs.all[key]; f != nil {
		f.waiters++
		return f
	}
	ctx, cancel := context.WithCancel(base)
	f := &flight[T]{cancel: cancel, waiters: 1, tracker: newTracker(), done: make(chan struct{})}
	fs.all[key] = f
	fs.wg.Go(func() {
		f.err = guard.Call(fs.log, fs.what, func() (err error) {
			f.result, err = run(ctx, f.tracker)
			return err
		})
		fs.forget(key, f)
		close(f.done)
		cancel()
	})
	return f
}

// leave removes one waiter. When the last waiter leaves, the work is cancelled; a later request starts it again.
func (fs *flights[T]) leave(key string, f *flight[T]) {
	fs.mu.Lock()
	f.waiters--
	last := f.waiters == 0
	if last && fs.all[key] == f {
		delete(fs.all, key)
	}
	fs.mu.Unlock()
	if last {
		f.cancel()
	}
}

func (fs *flights[T]) forget(key string, f *flight[T]) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.all[key] == f {
		delete(fs.all, key)
	}
}

// keyedMutex is a set of mutexes with keys, for work that must not run twice at the same time, such as a blob's
// transfer or a layer's unpacking. It is the unpack.KeyedLocker of all pulls.
type keyedMutex struct {
	mu    sync.Mutex
	byKey map[string]*keyedLock
}

type keyedLock struct {
	users int
	held  chan struct{} // holds a token while locked
}

// Lock waits for the lock of key or the end of ctx.
func (k *keyedMutex) Lock(ctx context.Context, key string) error {
	k.mu.Lock()
	l := k.byKey[key]
	if l == nil {
		l = &keyedLock{held: make(chan struct{}, 1)}
		k.byKey[key] = l
	}
	l.users++
	k.mu.Unlock()
	select {
	case l.held <- struct{}{}:
		return nil
	case <-ctx.Done():
		k.release(key, l)
		return context.Cause(ctx)
	}
}

func (k *keyedMutex) Unlock(key string) {
	k.mu.Lock()
	l := k.byKey[key]
	k.mu.Unlock()
	<-l.held
	k.release(key, l)
}

func (k *keyedMutex) release(key string, l *keyedLock) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if l.users--; l.users == 0 {
		delete(k.byKey, key)
	}
}
