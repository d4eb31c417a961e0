package image

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/tripod-run/tripod/internal/guard"
)

// flights makes one pull of all that ask for the same at the same time (fault I8).
type flights struct {
	log *slog.Logger
	mu  sync.Mutex
	all map[string]*flight
	wg  sync.WaitGroup
}

// flight is one pull under way. It lives as long as somebody waits for it.
type flight struct {
	cancel  context.CancelFunc
	waiters int
	tracker *tracker
	done    chan struct{}
	image   Image
	err     error
}

// do joins the flight of key, or starts it with run under base, and waits for its end or for that of ctx.
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

// leave takes one waiter away; with the last one the pull ends, and who asks later gets another.
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

// keyed is a set of mutexes by name, held by what must be done once: a blob's transfer, a layer's unpacking.
// It is the unpack.KeyedLocker of all pulls.
type keyed struct {
	mu    sync.Mutex
	locks map[string]*keyedLock
}

type keyedLock struct {
	users int
	held  chan struct{} // holds a token while locked
}

// Lock waits for the lock of key or for the end of ctx.
func (k *keyed) Lock(ctx context.Context, key string) error {
	k.mu.Lock()
	l := k.locks[key]
	if l == nil {
		l = &keyedLock{held: make(chan struct{}, 1)}
		k.locks[key] = l
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

// Unlock gives the lock of key back.
func (k *keyed) Unlock(key string) {
	k.mu.Lock()
	l := k.locks[key]
	k.mu.Unlock()
	<-l.held
	k.release(key, l)
}

func (k *keyed) release(key string, l *keyedLock) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if l.users--; l.users == 0 {
		delete(k.locks, key)
	}
}
