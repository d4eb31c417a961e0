package unitpods

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/runtime"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/node"
)

// queued is the capacity of the queue for Receive. When the queue is full, senders wait.
const queued = 256

// Runtime implements runtime.Runtime.
type Runtime struct {
	Config
	log   *slog.Logger
	files *imports
	watch *watcher
	out   chan outgoing

	lastWords, pollInterval time.Duration // shortened by tests

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu      sync.Mutex
	started time.Time // zero before the first Start
	sub     *node.Subscription
	modules map[int]*module
	pods    map[string]*module // by pod ID
}

// outgoing is a message for the manager. Before Receive returns the message, it calls the function taken, unless that
// function is nil.
type outgoing struct {
	channel.Message
	taken func()
}

var (
	_ runtime.Runtime = (*Runtime)(nil)
	_ runtime.Meter   = (*Runtime)(nil)
)

// New makes a runtime without starting it. It returns errdefs.ErrInvalidArgument for a bad configuration.
func New(c Config) (*Runtime, error) {
	if err := c.setDefaults(); err != nil {
		return nil, err
	}
	r := &Runtime{
		Config: c, log: c.Logger.With("runtime", c.Name), out: make(chan outgoing, queued), watch: newWatcher(), lastWords: lastWords,
		pollInterval: pollInterval,
		modules:      map[int]*module{}, pods: map[string]*module{},
	}
	r.files = newImports(c, r.log)
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r, nil
}

// Info implements runtime.Runtime.
func (r *Runtime) Info() runtime.Info {
	return runtime.Info{Type: Type, Name: r.Name, UUID: r.UUID, APIs: slices.Clone(APIs), MaxModules: r.MaxModules, Durable: true}
}

// Start implements runtime.Runtime. The runtime is part of the node and cannot be lost, so a second call does nothing.
func (r *Runtime) Start(context.Context) (map[string]any, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ctx.Err() != nil {
		return nil, r.closed()
	}
	if !r.started.IsZero() {
		return nil, nil
	}
	if err := os.MkdirAll(r.LogDir, 0o700); err != nil {
		return nil, fmt.Errorf("runtime %s: %w: %w", r.Name, err, errdefs.ErrUnavailable)
	}
	r.started, r.sub = time.Now(), r.Node.Subscribe()
	r.work.Go(guard.Loop(r.log, "wasm modules", r.followEvents))
	r.work.Go(guard.Loop(r.log, "wasm modules", r.sweep))
	return nil, nil
}

// Receive implements runtime.Runtime.
func (r *Runtime) Receive(ctx context.Context) (channel.Message, error) {
	select {
	case m := <-r.out:
		if m.taken != nil {
			m.taken()
		}
		return m.Message, nil
	case <-ctx.Done():
		return channel.Message{}, context.Cause(ctx)
	case <-r.ctx.Done():
		return channel.Message{}, r.closed()
	}
}

// Close implements runtime.Runtime. The modules keep running.
func (r *Runtime) Close() error {
	r.cancel()
	r.mu.Lock()
	if r.sub != nil {
		r.sub.Close()
	}
	r.mu.Unlock()
	for _, m := range r.all() {
		m.disconnect()
	}
	r.work.Wait()
	r.watch.close()
	return nil
}

// Group implements runtime.Runtime. Modules of the same worker form a group.
func (r *Runtime) Group(index int) string {
	m, err := r.at(index)
	if err != nil {
		return ""
	}
	return m.groupName()
}

// Usage implements runtime.Meter.
func (r *Runtime) Usage(ctx context.Context, index int) (runtime.Usage, bool) {
	m, err := r.at(index)
	if err != nil {
		return runtime.Usage{}, false
	}
	s, err := r.Node.ContainerStats(ctx, m.podID)
	if err != nil {
		return runtime.Usage{}, false
	}
	return runtime.Usage{CPU: float64(s.GetCpu().GetUsageNanoCores().GetValue()) / 1e9, Memory: s.GetMemory().GetWorkingSetBytes().GetValue()},
		true
}

func (r *Runtime) closed() error {
	return fmt.Errorf("runtime %s is closed: %w", r.Name, errdefs.ErrUnavailable)
}

// at returns the module at an index.
func (r *Runtime) at(index int) (*module, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m := r.modules[index]; m != nil {
		return m, nil
	}
	return nil, fmt.Errorf("runtime %s has no module at index %d: %w", r.Name, index, errdefs.ErrNotFound)
}

// spawn runs f in a goroutine that Close waits for. If the runtime is closed, spawn does nothing. The caller may hold
// module.mu.
func (r *Runtime) spawn(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ctx.Err() == nil {
		r.work.Go(guard.Func(r.log, "wasm modules", f))
	}
}

// send queues a message for the manager. It waits for room, and reports false if the runtime is closed.
func (r *Runtime) send(m outgoing) bool {
	select {
	case r.out <- m:
		return true
	case <-r.ctx.Done():
		return false
	}
}
