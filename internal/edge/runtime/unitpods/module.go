package unitpods

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

const (
	// undoTime bounds the clean-up after a failed Create, and some other calls to the node.
	undoTime = time.Minute
	// stopGrace is how long a deleted module may continue to run after its channels are closed.
	stopGrace = time.Second
)

// module is one module, from Create or Adopt to Cleanup.
type module struct {
	r     *Runtime
	index int
	uuid  string
	name  string
	// podID is the ID of the pod. In orders it also means the pod's container (docs/adr/0024).
	podID string
	// image is the ID of the module's image.
	image string
	// channels is set if the module has channels. deadline is when to end the module; zero means never.
	channels bool
	deadline time.Time

	// Each of these channels is closed on an event: created when Create has succeeded, failed when Create has failed,
	// and ended when the container has ended.
	created, failed, ended chan struct{}
	// channelsDone is closed once no more messages arrive from the module's channels.
	channelsDone chan struct{}
	log          *follower

	mu         sync.Mutex
	conn       *channel.Conn
	group      string
	open       map[int]byte // channels that were reported to the manager, with their QoS
	stopReason string       // why the runtime ends the module; "" if it does not
	timer      *time.Timer
	end        *ending
}

func (r *Runtime) newModule(index int, data wire.ModuleData) *module {
	return &module{
		r: r, index: index, uuid: data.UUID(), name: data.Name(), open: map[int]byte{},
		created: make(chan struct{}), failed: make(chan struct{}), ended: make(chan struct{}), channelsDone: make(chan struct{}),
	}
}

// Create implements runtime.Runtime. Its errors are errdefs.ErrInvalidArgument for data that cannot be honoured,
// ErrPermissionDenied for a path that is not below a root, ErrNotFound for a missing file or image, ErrAlreadyExists if
// the index or uuid is in use, ErrResourceExhausted for an index beyond the limit, and the node's errors.
func (r *Runtime) Create(ctx context.Context, index int, data wire.ModuleData) error {
	if err := data.Validate(); err != nil {
		return err
	}
	m := r.newModule(index, data)
	if err := r.put(m); err != nil {
		return err
	}
	err := m.create(ctx, data)
	if err == nil {
		close(m.created)
		return nil
	}
	close(m.failed)
	r.drop(m)
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	if undoErr := m.remove(undo); undoErr != nil {
		r.log.Warn("cannot remove the pod of a module that was not created; retrying later", "module", m.uuid, "err", undoErr)
	}
	return fmt.Errorf("create module %s (%q): %w", m.uuid, m.name, err)
}

// put adds a module to the tables.
func (r *Runtime) put(m *module) error {
	if m.index < 0 || m.index >= r.MaxModules {
		return fmt.Errorf("module %s at index %d: runtime %s has room for %d: %w", m.uuid, m.index, r.Name, r.MaxModules,
			errdefs.ErrResourceExhausted)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.started.IsZero() || r.ctx.Err() != nil {
		return fmt.Errorf("runtime %s is not started, or closed: %w", r.Name, errdefs.ErrUnavailable)
	}
	if old := r.modules[m.index]; old != nil {
		return fmt.Errorf("module %s: module %s has index %d: %w", m.uuid, old.uuid, m.index, errdefs.ErrAlreadyExists)
	}
	for _, other := range r.modules {
		if other.uuid == m.uuid {
			return fmt.Errorf("module %s runs already, at index %d: %w", m.uuid, other.index, errdefs.ErrAlreadyExists)
		}
	}
	r.modules[m.index] = m
	return nil
}

// drop removes a module from the tables.
func (r *Runtime) drop(m *module) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.modules[m.index] == m {
		delete(r.modules, m.index)
	}
	if r.pods[m.podID] == m {
		delete(r.pods, m.podID)
	}
}

// create creates the module's pod and starts it.
func (m *module) create(ctx context.Context, data wire.ModuleData) error {
	p, err := m.r.plan(data)
	if err != nil {
		return err
	}
	if err := m.r.removePrevious(ctx, m.uuid); err != nil {
		return err
	}
	if m.image, err = m.r.imageOf(ctx, data, p); err != nil {
		return err
	}
	if m.log, err = newFollower(m, p.logDir); err != nil {
		return err
	}
	if m.podID, err = m.r.Node.RunSandbox(ctx, p.pod, m.r.Handler); err != nil {
		return err
	}
	if _, err := m.r.Node.CreateContainer(ctx, m.podID, p.container); err != nil {
		return err
	}
	m.channels = len(p.channels) > 0
	m.watchPod()
	started := time.Now()
	if err := m.r.Node.StartContainer(ctx, m.podID); err != nil {
		return err
	}
	if p.deadline > 0 {
		m.deadline = started.Add(p.deadline)
	}
	m.watch()
	return nil
}

// watchPod routes the pod's events to the module.
func (m *module) watchPod() {
	m.r.mu.Lock()
	defer m.r.mu.Unlock()
	m.r.pods[m.podID] = m
}

// watch starts the module's log follower, channels and deadline.
func (m *module) watch() {
	m.r.spawn(m.log.run)
	if m.channels {
		m.r.spawn(m.converse)
	} else {
		close(m.channelsDone)
	}
	if m.deadline.IsZero() {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.timer = time.AfterFunc(time.Until(m.deadline), func() {
		ctx, cancel := context.WithTimeout(m.r.ctx, undoTime)
		defer cancel()
		if err := m.stop(ctx, reasonDeadline, 0); err != nil && ctx.Err() == nil {
			m.r.log.Error("cannot end a module at its deadline", "module", m.uuid, "err", err)
		}
	})
}

// stop ends the module for the given reason. WASI has no signals, so a module can learn only from its closed channels
// that it should end. A module without channels therefore gets no grace period.
func (m *module) stop(ctx context.Context, reason string, grace time.Duration) error {
	m.mu.Lock()
	if m.stopReason == "" {
		m.stopReason = reason
	}
	m.mu.Unlock()
	if !m.channels {
		grace = 0
	}
	err := m.r.Node.StopContainer(ctx, m.podID, grace)
	if errdefs.IsNotFound(err) {
		m.markEnded(lostPod)
		return nil
	}
	select {
	case <-m.ended: // the pod may refuse because it is stopping already
		return nil
	default:
		return err
	}
}

// Delete implements runtime.Runtime.
func (r *Runtime) Delete(ctx context.Context, index int, uuid string) error {
	m, err := r.at(index)
	if err != nil {
		return err
	}
	if m.uuid != uuid {
		return fmt.Errorf("module %s is not at index %d, which module %s has: %w", uuid, index, m.uuid, errdefs.ErrNotFound)
	}
	select {
	case <-m.created:
	case <-m.failed:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return m.stop(ctx, reasonKilled, stopGrace)
}

// Stop implements runtime.Runtime: it ends all modules.
func (r *Runtime) Stop(ctx context.Context) error {
	modules := r.all()
	errs := make([]error, len(modules))
	var stops sync.WaitGroup
	for i, m := range modules {
		stops.Go(func() {
			if err := r.Delete(ctx, m.index, m.uuid); !errdefs.IsNotFound(err) {
				errs[i] = err
			}
		})
	}
	stops.Wait()
	return errors.Join(errs...)
}

func (r *Runtime) all() []*module {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Values(r.modules))
}

// Cleanup implements runtime.Runtime: it removes the pod and the log, and releases the image.
func (r *Runtime) Cleanup(ctx context.Context, index int, uuid string) error {
	m, err := r.at(index)
	if err != nil || m.uuid != uuid {
		return nil // already cleaned up
	}
	err = m.remove(ctx)
	r.drop(m)
	return err
}

// remove removes the module's pod and log, and releases its image.
func (m *module) remove(ctx context.Context) error {
	m.mu.Lock()
	if m.timer != nil {
		m.timer.Stop()
	}
	m.mu.Unlock()
	m.disconnect()
	if m.image != "" {
		m.r.files.leave(m.image)
		m.image = ""
	}
	err := m.r.removePod(ctx, m.podID)
	if m.log != nil && err == nil {
		err = m.log.remove()
	}
	return err
}
