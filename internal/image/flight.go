package image

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/tripod-run/tripod/internal/guard"
)

// flights merges concurrent pulls of the same image into one (fault I8).
type flights struct {
	log *slog.Logger
	mu  sync.Mutex
	all map[string]*flight
	wg  sync.WaitGroup
}

// flight is one pull under way. It is cancelled once no caller waits for it.
type flight struct {
	cancel  context.CancelFunc
	waiters int
	tracker *tracker
	done    chan struct{}
	image   Image
	err     error
}

// do joins the flight for the key, or starts a flight that calls run with a context derived from base. It waits until
// the flight or ctx ends.
func (fs *flights) do(ctx, base context.Context, key string, onProgress func(Progress), run func(context.Context, *tracker) (Image, error)) (Image, error) {
	f := fs.join(base, key, run)
	defer fs.leave(key, f)
	defer f.tracker.subscribe(onProgress)()
	select {
	case <-f.done:
		return f.image, f.err
	case <-ctx.Done():
		return Image{}, fmt.Errorf("stopped waiting for the pull: %w", context.Cause(ctx))
	}
}

func (fs *flights) join(base context.Context, key string, run func(context.Context, *tracker) (Image, error)) *flight {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if f := fs.all[key]; f != nil {
		f.waiters++
		return f
	}
	ctx, cancel := context.WithCancel(base)
	f := &flight{cancel: cancel, waiters: 1, tracker: newTracker(), done: make(chan struct{})}
	fs.all[key] = f
	fs.wg.Go(func() {
		f.err = guard.Call(fs.log, "image pull", func() (err error) {
			f.image, err = run(ctx, f.tracker)
			return err
		})
		fs.forget(key, f)
		close(f.done)
		cancel()
	})
	return f
}

// leave removes one waiter. When the last waiter leaves, the pull is cancelled; a later request starts a new pull.
func (fs *flights) leave(key string, f *flight) {
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

func (fs *flights) forget(key string, f *flight) {
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
