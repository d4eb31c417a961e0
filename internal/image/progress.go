package image

import (
	"context"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// progressPace is the interval between progress reports.
const progressPace = 200 * time.Millisecond

// tracker tracks the progress of one pull, for its callers and for the watch that cancels a stalled pull.
type tracker struct {
	start time.Time
	// moved is the time of the last progress, in nanoseconds after start.
	moved atomic.Int64
	// active counts the transfers and unpacks under way. It does not count those that wait for their turn.
	active atomic.Int32

	mu        sync.Mutex
	progress  Progress
	at        map[digest.Digest]int64 // bytes done, by blob
	reported  time.Time
	nextID    int
	listeners map[int]func(Progress)
}

func newTracker() *tracker {
	return &tracker{start: time.Now(), at: map[digest.Digest]int64{}, listeners: map[int]func(Progress){}}
}

// subscribe adds a listener; the returned function removes it.
func (t *tracker) subscribe(fn func(Progress)) func() {
	if fn == nil {
		return func() {}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	id := t.nextID
	t.nextID++
	t.listeners[id] = fn
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(t.listeners, id)
	}
}

// Busy marks the start of work that should make progress; the returned function marks its end.
func (t *tracker) Busy() func() {
	t.Touch()
	t.active.Add(1)
	return func() {
		t.active.Add(-1)
		t.Touch()
	}
}

func (t *tracker) Touch() { t.moved.Store(int64(time.Since(t.start))) }

// Begin sets the total size of the image's blobs and resets the progress.
func (t *tracker) Begin(total int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.at)
	t.progress.Total, t.progress.Done = total, 0
}

// Reached sets how many bytes of a blob are done. The number decreases if the transfer restarts.
func (t *tracker) Reached(blob digest.Digest, offset int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.progress.Done += offset - t.at[blob]
	t.at[blob] = offset
	t.progress.Current = blob
	if now := time.Now(); now.Sub(t.reported) >= progressPace {
		t.reported = now
		t.notify()
	}
}

// finish reports all bytes as done, including those that needed no transfer.
func (t *tracker) finish() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.progress.Done = t.progress.Total
	t.notify()
}

func (t *tracker) notify() {
	for _, report := range t.listeners {
		report(t.progress)
	}
}

// position returns how many bytes of a blob are done.
func (t *tracker) position(blob digest.Digest) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.at[blob]
}

// watch returns a context that is cancelled once active work has made no progress for the given timeout.
func (t *tracker) watch(ctx context.Context, timeout time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		ticker := time.NewTicker(max(timeout/8, time.Millisecond))
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			if t.active.Load() == 0 {
				t.Touch()
			} else if time.Since(t.start)-time.Duration(t.moved.Load()) > timeout {
				cancel(fmt.Errorf("no progress for %v: %w", timeout, errdefs.ErrUnavailable))
				return
			}
		}
	}()
	return ctx, func() { cancel(nil) }
}

// trackedFetcher reports the progress of a fetcher to a tracker.
type trackedFetcher struct {
	remotes.Fetcher
	tracker *tracker
}

func (f trackedFetcher) Fetch(ctx context.Context, desc ocispec.Descriptor) (io.ReadCloser, error) {
	rc, err := f.Fetcher.Fetch(ctx, desc)
	if err != nil {
		return nil, err
	}
	return &trackedReader{ReadCloser: rc, tracker: f.tracker, digest: desc.Digest}, nil
}

type trackedReader struct {
	io.ReadCloser
	tracker *tracker
	digest  digest.Digest
	offset  int64
}

func (r *trackedReader) Read(p []byte) (int, error) {
	n, err := r.ReadCloser.Read(p)
	if n > 0 {
		r.tracker.Touch()
		r.offset += int64(n)
		r.tracker.Reached(r.digest, r.offset)
	}
	return n, err
}

// Seek lets a broken transfer resume; docker's fetcher always supports it.
func (r *trackedReader) Seek(offset int64, whence int) (int64, error) {
	seeker, ok := r.ReadCloser.(io.Seeker)
	if !ok {
		return 0, fmt.Errorf("%T cannot seek: %w", r.ReadCloser, errdefs.ErrNotImplemented)
	}
	at, err := seeker.Seek(offset, whence)
	if err == nil {
		r.offset = at
		r.tracker.Reached(r.digest, at)
	}
	return at, err
}
