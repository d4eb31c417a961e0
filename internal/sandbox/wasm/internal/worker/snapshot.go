package worker

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

const (
	// maxSnapshot bounds the memory of a pod's snapshot, in bytes. It also counts as memory that the worker holds for the
	// pod.
	maxSnapshot = 64 << 20
	// snapshotIdle is how long a pod without requests keeps its snapshot. The next request makes another one.
	snapshotIdle = time.Minute
	// snapshotRetry is how long to wait after an attempt that failed because its client gave up or memory was short. Other
	// failures are final.
	snapshotRetry = 10 * time.Second
	// snapshotPatience is how long the initialization of a guest can take, at most half of the time of a request, so that
	// the request can do without. After snapshotAttempts that took longer, or needed more memory than the pod's other
	// instances had left, there are no others.
	snapshotPatience = 10 * time.Second
	snapshotAttempts = 3
	// preparedRoom is the number of instances for which a pod needs memory before a snapshot is made without a request.
	preparedRoom = 4
)

// snapshotter makes and keeps the snapshot from which a pod's instances begin. It is made when the pod has started, or the first
// request makes it in its own instance; requests beside it are initialized as usual. It belongs to the pod and not to
// the image, because guests read their environment when they are initialized.
type snapshotter struct {
	pod *pod

	patience time.Duration

	mu       sync.Mutex
	current  *engine.Snapshot
	making   bool
	reason   string    // why the last attempt failed
	cold     string    // why there is no warm-up, or ""
	final    bool      // there will be none
	attempts int       // that took too long or too much memory
	retry    time.Time // no attempt before
	used     time.Time
	timer    *time.Timer // runs while there is a snapshot
	unasked  bool        // it was made before a request, which has not come yet; holds one of Worker.unasked
	closed   bool
}

// warmError is an error after which a snapshot without the warm-up may succeed. If usable is set, the instance is as good as
// any.
type warmError struct {
	error
	usable bool
}

func (e warmError) Unwrap() error { return e.error }

// errSlow means that the initialization took longer than the request could wait for it.
var errSlow = errors.New("too long for a request")

// prepare makes the snapshot before the first request, after the first instance has been made. It does not if the pod's memory
// has no room for several instances, because the first requests need it, or if enough other pods of the worker have a
// snapshot without a request: pods that nobody calls would take memory, and the starts of many pods processor time.
func (s *snapshotter) prepare(ctx context.Context, limits workerapi.Limits) {
	code, memory := s.pod.code, uint64(s.pod.spec.Resources.MemoryBytes)
	switch {
	case limits.Snapshot == workerapi.SnapshotNever, code.prepare == nil && code.warm == nil:
		return
	case memory > 0 && memory < preparedRoom*s.pod.account.MemoryPeak():
		return
	case !s.pod.worker.unasked.TryAcquire(1):
		return
	}
	s.mu.Lock()
	s.unasked = true
	s.mu.Unlock()
	if g, err := s.pod.instantiate(ctx, limits); err == nil {
		g.Close()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current == nil {
		s.asked()
	}
}

// asked notes that the pod has its first request, or no snapshot any more. The caller holds s.mu.
func (s *snapshotter) asked() {
	if s.unasked {
		s.unasked = false
		s.pod.worker.unasked.Release(1)
	}
}

// get returns the snapshot for an instance, or nil, and whether the caller must make one.
func (s *snapshotter) get(mode workerapi.SnapshotMode) (current *engine.Snapshot, mustMake bool) {
	if mode == workerapi.SnapshotNever {
		return nil, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current != nil {
		s.asked()
		s.used = time.Now()
		return s.current, false
	}
	if code := s.pod.code; code.prepare == nil && (code.warm == nil || s.cold != "") {
		return s.initial(), false
	}
	if s.making || s.closed || s.final || time.Now().Before(s.retry) {
		return nil, false
	}
	s.making = true
	return nil, true
}

// make makes the snapshot from an instance that has just been initialized. It returns false if no request may use the
// instance afterwards.
func (s *snapshotter) make(ctx context.Context, g *guest, limits workerapi.Limits) bool {
	patience := min(s.patience, limits.RequestTimeout/2)
	if deadline, ok := ctx.Deadline(); ok {
		patience = min(patience, time.Until(deadline)/2)
	}
	within, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("it takes longer than %v: %w", patience, errSlow))
	defer cancel()
	snapshot, err := s.capture(within, g, limits.Snapshot)
	if err != nil {
		s.failed(ctx, err)
		warm, ok := errors.AsType[warmError](err)
		return g.Alive() && (!ok || warm.usable)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.making = false
	if s.closed {
		s.discard(snapshot)
		return true
	}
	s.reason = s.cold
	s.set(snapshot)
	return true
}

// set keeps a snapshot until the pod is idle. The caller holds s.mu.
func (s *snapshotter) set(snapshot *engine.Snapshot) {
	s.current, s.used = snapshot, time.Now()
	s.timer = time.AfterFunc(snapshotIdle, s.expire)
}

// initial returns the state in which the instances of a guest without snapshots begin, or nil if the engine does not keep
// memories of such a guest, or no memory or file is left. The caller holds s.mu.
func (s *snapshotter) initial() *engine.Snapshot {
	if s.closed || s.final {
		return nil
	}
	snapshot, err := s.pod.code.engine.Initial(s.pod.account)
	if snapshot == nil {
		s.final = err == nil
		return nil
	}
	s.set(snapshot)
	return snapshot
}

// failed ends the making of a snapshot without one.
func (s *snapshotter) failed(ctx context.Context, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.making = false
	s.reason, s.retry = shorten(err.Error()), time.Now().Add(snapshotRetry)
	_, warm := errors.AsType[warmError](err)
	tooMuch := errors.Is(err, errSlow) || errors.Is(err, engine.ErrMemory) || warm && errdefs.IsResourceExhausted(err)
	if tooMuch {
		s.attempts++
	}
	switch {
	case ctx.Err() != nil, tooMuch && s.attempts < snapshotAttempts:
		return
	case errdefs.IsResourceExhausted(err) && !tooMuch:
		return
	}
	what := "each request initializes the component again, because there is no snapshot: "
	if warm || s.pod.code.prepare == nil { // such a guest begins as its maker built it
		what = "the first uses of what the component needs are in each request: "
		s.cold, s.attempts, s.retry = s.reason, 0, time.Time{}
	} else {
		s.final = true
	}
	s.pod.output.logLine("tripod: " + what + s.reason)
	s.pod.worker.config.Publish(workerapi.Event{Fallback: &workerapi.Fallback{ID: s.pod.spec.ID, Reason: what + s.reason}})
	s.pod.worker.logger.Info("no snapshot, or none with a warm-up", "pod", s.pod.spec.ID, "component", s.pod.spec.Component, "err", s.reason)
}

// capture makes a snapshot and charges the pod for it.
func (s *snapshotter) capture(ctx context.Context, g *guest, mode workerapi.SnapshotMode) (*engine.Snapshot, error) {
	var renewed uint32
	var err error
	if prepare := s.pod.code.prepare; prepare != nil {
		if renewed, err = readings(ctx, g, prepare, "initialization"); err != nil {
			return nil, err
		}
	}
	trusted := mode == workerapi.SnapshotAlways
	warmed := s.pod.code.warm != nil && s.cold == ""
	if warmed {
		if err := g.MayCapture(renewed, trusted); err != nil {
			return nil, err
		}
		if renewed, err = readings(ctx, g, s.pod.code.warm, "warm-up"); err != nil {
			return nil, warmError{error: err}
		}
	}
	if warmed && !g.Alive() {
		return nil, warmError{error: fmt.Errorf("it trapped after its warm-up: %w", errdefs.ErrFailedPrecondition)}
	}
	one := s.pod.worker.capturing
	if one.Acquire(ctx, 1) != nil {
		return nil, fmt.Errorf("the worker makes the snapshots of other pods: %w", errdefs.ErrResourceExhausted)
	}
	snapshot, err := g.Capture(renewed, trusted, maxSnapshot)
	one.Release(1)
	if err != nil && warmed && errdefs.IsFailedPrecondition(err) {
		return nil, warmError{error: fmt.Errorf("after its warm-up: %w", err)}
	}
	if err != nil {
		return nil, err
	}
	if !s.pod.account.Take(engine.HeldBytes, int64(snapshot.Size())) {
		snapshot.Close()
		err := fmt.Errorf("its %d bytes exceed what the worker may hold for the pod: %w", snapshot.Size(), errdefs.ErrResourceExhausted)
		if warmed {
			err = warmError{fmt.Errorf("after its warm-up: %w", err), true}
		}
		return nil, err
	}
	return snapshot, nil
}

// readings calls a function of engine.PrepareSignature's type, and returns its result.
func readings(ctx context.Context, g *guest, f *engine.Func, what string) (uint32, error) {
	out, err := g.Call(ctx, f, nil, nil)
	if err != nil {
		return 0, fmt.Errorf("its %s failed: %w", what, err)
	}
	r := wit.NewReader(out)
	if r.Case(2) != resultOK {
		return 0, fmt.Errorf("its %s failed: %s: %w", what, shorten(r.String()), errdefs.ErrFailedPrecondition)
	}
	return r.U32(), nil
}

// expire discards the snapshot of a pod that has been without requests.
func (s *snapshotter) expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current == nil {
		return
	}
	if left := snapshotIdle - time.Since(s.used); left > 0 {
		s.timer.Reset(left)
		return
	}
	s.asked()
	s.discard(s.current)
	s.current = nil
}

// discard releases a snapshot. The caller holds s.mu.
func (s *snapshotter) discard(snapshot *engine.Snapshot) {
	s.pod.account.Give(engine.HeldBytes, int64(snapshot.Size()))
	snapshot.Close()
}

// close releases the snapshot. Afterwards there is no other.
func (s *snapshotter) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.asked()
	if s.current != nil {
		s.timer.Stop()
		s.discard(s.current)
		s.current = nil
	}
}

// state describes the snapshot.
func (s *snapshotter) state() workerapi.SnapshotState {
	s.mu.Lock()
	defer s.mu.Unlock()
	state := workerapi.SnapshotState{Reason: s.reason}
	if s.current != nil {
		state.Bytes = int64(s.current.Size())
	}
	if why := s.pod.code.engine.WhyNoSnapshot(); why != "" {
		state.Reason = why
	}
	return state
}
