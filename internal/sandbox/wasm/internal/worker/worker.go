package worker

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// Config configures a Worker.
type Config struct {
	// Name is the worker's name. Program is the version of tripod-wasm. Pid is the worker's process ID in the daemon's
	// PID namespace. Hello reports all three.
	Name, Program string
	Pid           int
	Engine        *engine.Engine
	Logger        *slog.Logger
	// Connections limits the connections of each pod.
	Connections connlimit.Config
	// Publish sends an event to the connected daemons. It must not block.
	Publish func(workerapi.Event)
	// LogSizeMax bounds the size of a pod's log file, in bytes; 0 means no limit.
	LogSizeMax int64
	// Unasked is the number of pods without a request that have a snapshot for the first one. Each can have tens of MiB for a
	// minute.
	Unasked int64
	// Spans says whether the worker publishes the spans of requests as events.
	Spans bool
}

// Worker runs the pods of one worker process. It implements workerapi.Handler.
type Worker struct {
	config    Config
	engine    *engine.Engine
	logger    *slog.Logger
	spans     *spans // nil if spans are off
	startedAt time.Time
	// Shared by all pods:
	router      *channel.Router
	connections *connlimit.Group
	account     *engine.Account
	ahead       *semaphore.Weighted // memory for the rests of half-duplex streams, in bytes
	sockets     atomic.Int64        // that guests have opened
	roots       rootCache
	unasked     *semaphore.Weighted // of Config.Unasked
	capturing   *semaphore.Weighted // of 1: snapshots are made one at a time, because making one takes several times its memory
	daemon      *presence

	loading sync.Mutex // serializes Load

	mu     sync.Mutex
	codes  map[string]*code
	pods   map[string]*pod
	closed bool
}

// New makes a worker without pods.
func New(c Config) *Worker {
	w := &Worker{
		config: c, engine: c.Engine, logger: c.Logger, startedAt: time.Now(),
		connections: connlimit.NewGroup(c.Logger),
		codes:       map[string]*code{}, pods: map[string]*pod{}, router: newRouter(), account: engine.NewAccount(0),
		ahead: semaphore.NewWeighted(dataplane.AheadMemory), unasked: semaphore.NewWeighted(c.Unasked), capturing: semaphore.NewWeighted(1),
		daemon: &presence{},
	}
	if c.Spans {
		w.spans = newSpans(c.Publish)
	}
	return w
}

// Hello implements workerapi.Handler.
func (w *Worker) Hello() workerapi.Hello {
	return workerapi.Hello{
		Version: workerapi.Version, Program: w.config.Program, Engine: engine.Fingerprint(),
		Name: w.config.Name, Pid: w.config.Pid, StartedAt: w.startedAt,
	}
}

// Daemon implements workerapi.Handler.
func (w *Worker) Daemon(connected bool) { w.daemon.set(connected) }

// Start implements workerapi.Handler.
func (w *Worker) Start(_ context.Context, spec workerapi.PodSpec) (workerapi.Status, error) {
	p, err := w.newPod(spec)
	if err != nil {
		spec.CloseFiles()
		return workerapi.Status{}, err
	}
	defer p.lifecycle.Unlock() // locked by newPod, so that other orders for the pod wait
	if err := p.start(); err != nil {
		w.forget(p)
		return workerapi.Status{}, err
	}
	w.logger.Info("pod started", "pod", p.spec.ID, "component", p.spec.Component, "world", p.code.World)
	return p.currentStatus(), nil
}

// newPod makes a pod, locks its lifecycle and adds it to w.pods. It replaces an exited pod with the same ID.
func (w *Worker) newPod(spec workerapi.PodSpec) (*pod, error) {
	if err := validate(&spec); err != nil {
		return nil, err
	}
	c, err := w.acquireCode(spec.Digest)
	if err != nil {
		return nil, err
	}
	spec.Holdings.Files = w.boundFiles(spec.Holdings.Files)
	p := makePod(w, spec, c)
	w.mu.Lock()
	old := w.pods[spec.ID]
	switch {
	case old != nil && old.running():
		err = fmt.Errorf("pod %s is already running: %w", spec.ID, errdefs.ErrAlreadyExists)
	case w.closed:
		err = fmt.Errorf("the worker is shutting down: %w", errdefs.ErrUnavailable)
	}
	if err != nil {
		w.mu.Unlock()
		w.releaseCode(c)
		return nil, err
	}
	p.lifecycle.Lock()
	w.pods[spec.ID] = p
	w.mu.Unlock()
	if old != nil {
		w.releaseCode(old.code)
	}
	return p, nil
}

// boundFiles limits the open files of all guests to half of RLIMIT_NOFILE. It returns the limit for one pod, which is
// the requested limit (0 means unlimited), but at most a quarter of that half. The other half is for sockets,
// connections and logs. RLIMIT_NOFILE is read for each pod, because the daemon sets it while the worker is running.
func (w *Worker) boundFiles(requested int64) int64 {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return requested
	}
	all := max(4, int64(min(limit.Cur, math.MaxInt64)/2))
	w.account.Bound(engine.HeldFiles, all)
	if requested == 0 {
		return all / 4
	}
	return min(requested, all/4)
}

// validate checks the fields that do not depend on the component's world, and fills in default limits.
func validate(s *workerapi.PodSpec) error {
	switch {
	case s.ID == "":
		return fmt.Errorf("start: no pod ID: %w", errdefs.ErrInvalidArgument)
	case s.Holdings.Files < 0 || s.Holdings.Handles < 0 || s.Holdings.HostBytes < 0 || s.Holdings.Sockets < 0:
		return fmt.Errorf("pod %s: negative holdings: %w", s.ID, errdefs.ErrInvalidArgument)
	case s.Resources.MemoryBytes < 0 || s.Resources.CPUQuota < 0 || s.Resources.CPUPeriod < 0:
		return fmt.Errorf("pod %s: negative resources: %w", s.ID, errdefs.ErrInvalidArgument)
	}
	if err := checkMounts(s.Mounts); err != nil {
		return fmt.Errorf("pod %s: %w", s.ID, err)
	}
	if err := channel.Validate(s.Channels); err != nil {
		return fmt.Errorf("pod %s: %w", s.ID, err)
	}
	return fillLimits(&s.Limits)
}

func fillLimits(l *workerapi.Limits) error {
	if l.RequestTimeout < 0 || l.MaxMessageBytes < 0 || l.Concurrency < 0 || l.ReuseRequests < 0 || l.ReuseAge < 0 {
		return fmt.Errorf("negative limits: %w", errdefs.ErrInvalidArgument)
	}
	l.RequestTimeout = cmp.Or(l.RequestTimeout, workerapi.DefaultRequestTimeout)
	l.MaxMessageBytes = cmp.Or(l.MaxMessageBytes, workerapi.DefaultMaxMessageBytes)
	l.Concurrency = cmp.Or(l.Concurrency, workerapi.DefaultConcurrency)
	l.ReuseRequests = cmp.Or(l.ReuseRequests, workerapi.DefaultReuseRequests)
	l.ReuseAge = cmp.Or(l.ReuseAge, workerapi.DefaultReuseAge)
	return nil
}

// forget removes a pod from w.pods.
func (w *Worker) forget(p *pod) {
	w.mu.Lock()
	ours := w.pods[p.spec.ID] == p
	if ours {
		delete(w.pods, p.spec.ID)
	}
	w.mu.Unlock()
	if ours {
		w.releaseCode(p.code)
	}
}

// pod returns the pod with the given ID. If the pod is still starting, the method waits until the start is complete.
func (w *Worker) pod(id string) (*pod, error) {
	w.mu.Lock()
	p := w.pods[id]
	w.mu.Unlock()
	if p == nil {
		return nil, fmt.Errorf("worker has no pod %s: %w", id, errdefs.ErrNotFound)
	}
	p.lifecycle.Lock()
	defer p.lifecycle.Unlock()
	if !p.started {
		return nil, fmt.Errorf("pod %s failed to start: %w", id, errdefs.ErrNotFound)
	}
	return p, nil
}

// Stop implements workerapi.Handler.
func (w *Worker) Stop(ctx context.Context, id string, grace time.Duration) (workerapi.Status, error) {
	p, err := w.pod(id)
	if err != nil {
		return workerapi.Status{}, err
	}
	p.stop(grace)
	select {
	case <-p.done:
		return p.currentStatus(), nil
	case <-ctx.Done():
		return p.currentStatus(), ctx.Err()
	}
}

// Kill implements workerapi.Handler.
func (w *Worker) Kill(ctx context.Context, id string) error {
	_, err := w.Stop(ctx, id, 0)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// Remove implements workerapi.Handler.
func (w *Worker) Remove(ctx context.Context, id string) error {
	p, err := w.pod(id)
	if err != nil {
		return nil // already removed
	}
	p.stop(0)
	select {
	case <-p.done:
	case <-ctx.Done():
		return ctx.Err()
	}
	w.forget(p)
	return nil
}

// List implements workerapi.Handler.
func (w *Worker) List(context.Context) ([]workerapi.Status, error) {
	return each(w, nil, (*pod).currentStatus), nil
}

// Stats implements workerapi.Handler.
func (w *Worker) Stats(_ context.Context, ids []string) ([]workerapi.Stats, error) {
	return each(w, ids, (*pod).stats), nil
}

// Metrics implements workerapi.Handler.
func (w *Worker) Metrics(_ context.Context, ids []string) ([]workerapi.Metrics, error) {
	return each(w, ids, (*pod).metrics), nil
}

// each calls the given function for the pods with the given IDs, or for all pods if there are no IDs. It returns the
// results, ordered by pod ID.
func each[T any](w *Worker, ids []string, ask func(*pod) T) []T {
	w.mu.Lock()
	pods := make(map[string]*pod, len(ids))
	for _, id := range ids {
		if p := w.pods[id]; p != nil {
			pods[id] = p
		}
	}
	if len(ids) == 0 {
		maps.Copy(pods, w.pods)
	}
	w.mu.Unlock()
	list := make([]T, 0, len(pods))
	for _, id := range slices.Sorted(maps.Keys(pods)) {
		list = append(list, ask(pods[id]))
	}
	return list
}

// Attach implements workerapi.Handler.
func (w *Worker) Attach(_ context.Context, id string, session *workerapi.AttachSession) error {
	p, err := w.pod(id)
	if err != nil {
		return err
	}
	if !p.output.attach(session, p.stdin) {
		return fmt.Errorf("pod %s has exited: %w", id, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// ReopenLog implements workerapi.Handler.
func (w *Worker) ReopenLog(_ context.Context, id string, file *os.File) error {
	if file == nil {
		return fmt.Errorf("pod %s: no log file was passed: %w", id, errdefs.ErrInvalidArgument)
	}
	p, err := w.pod(id)
	if err != nil {
		file.Close()
		return err
	}
	if err := p.output.reopen(file); err != nil {
		return fmt.Errorf("pod %s has exited: %w: %w", id, err, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// UpdateTLS implements workerapi.Handler.
func (w *Worker) UpdateTLS(_ context.Context, id string, t workerapi.TLS) error {
	p, err := w.pod(id)
	if err != nil {
		return err
	}
	return p.program.updateTLS(t)
}

// UpdateDialer implements workerapi.Handler.
func (w *Worker) UpdateDialer(_ context.Context, id string, dialer *os.File) error {
	p, err := w.pod(id)
	if err == nil && p.egress == nil {
		err = fmt.Errorf("pod %s may not call out: %w", id, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		dialer.Close()
		return err
	}
	return p.egress.connect(dialer)
}

// Update implements workerapi.Handler.
func (w *Worker) Update(_ context.Context, u workerapi.Update) error {
	p, err := w.pod(u.ID)
	if err != nil {
		return err
	}
	return p.update(u)
}

// closeDrain bounds how long Close waits for attached clients, which must be shorter than the daemon's patience with a
// worker that ends.
const closeDrain = 2 * time.Second

// Close kills all pods, waits for them to exit, and lets attached clients read the last output.
func (w *Worker) Close() {
	w.mu.Lock()
	w.closed = true
	pods := maps.Clone(w.pods)
	w.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), closeDrain)
	defer cancel()
	var all sync.WaitGroup
	for id, p := range pods {
		all.Go(func() {
			_ = w.Kill(context.Background(), id)
			p.drain(ctx)
		})
	}
	all.Wait()
	w.spans.close()
}
