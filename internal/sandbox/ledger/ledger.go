package ledger

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// State is a kind's state of a container: a struct that embeds Record and stands in the state file as JSON. It is copied by
// value, so whoever changes it replaces its slices and maps and does not edit them.
type State interface {
	Status() sandbox.Status
}

// Ledger owns the handles of a kind's containers, and where their events go. S is the kind's state of a container, R what it has
// of a run of one.
type Ledger[S State, R any] struct {
	format Format
	file   func(podID, id string) string
	log    *slog.Logger

	mu      sync.Mutex
	sink    sandbox.Sink
	handles map[string]*Handle[S, R]
}

// New makes a ledger whose state files are of the given format and lie where file says.
func New[S State, R any](format Format, file func(podID, id string) string, log *slog.Logger) *Ledger[S, R] {
	return &Ledger[S, R]{format: format, file: file, log: log, sink: func(sandbox.Event) {}, handles: map[string]*Handle[S, R]{}}
}

// Create makes a container exist, in the given state: on the disk first, so that one that cannot be written does not exist.
func (l *Ledger[S, R]) Create(podID, id string, state S) error {
	if err := l.format.Write(l.file(podID, id), state); err != nil {
		return err
	}
	h := l.keep(podID, id, state)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.state = state
	return nil
}

// Find gives a container's handle, from the disk when it is not in memory; nil when there is no such container.
func (l *Ledger[S, R]) Find(podID, id string) (*Handle[S, R], error) {
	if h := l.Loaded(id); h != nil {
		return h, nil
	}
	var s S
	err := l.format.Read(l.file(podID, id), &s)
	if errdefs.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return l.keep(podID, id, s), nil
}

// Get is Find for what needs the container to exist: errdefs.ErrFailedPrecondition when it does not.
func (l *Ledger[S, R]) Get(podID, id string) (*Handle[S, R], error) {
	h, err := l.Find(podID, id)
	if h == nil && err == nil {
		err = fmt.Errorf("container %s is not created: %w", id, errdefs.ErrFailedPrecondition)
	}
	return h, err
}

// Startable is Get for a start; the handle is nil when the container runs already, which is no error.
func (l *Ledger[S, R]) Startable(podID, id string) (*Handle[S, R], error) {
	h, err := l.Get(podID, id)
	if err != nil {
		return nil, err
	}
	if _, run := h.Snapshot(); run != nil {
		return nil, nil
	}
	return h, nil
}

// FindRun gives a container with its present run; the run is nil when there is none, and the handle when there is no container.
func (l *Ledger[S, R]) FindRun(podID, id string) (*Handle[S, R], *R, error) {
	h, err := l.Find(podID, id)
	if h == nil {
		return nil, nil, err
	}
	_, run := h.Snapshot()
	return h, run, nil
}

// GetRun is FindRun for what needs the container to run: errdefs.ErrFailedPrecondition when it does not.
func (l *Ledger[S, R]) GetRun(podID, id string) (*Handle[S, R], *R, error) {
	h, run, err := l.FindRun(podID, id)
	if run == nil && err == nil {
		err = fmt.Errorf("container %s does not run: %w", id, errdefs.ErrFailedPrecondition)
	}
	return h, run, err
}

// Loaded gives the handle that is in memory, nil for none: for news of a run, which only such a container can have.
func (l *Ledger[S, R]) Loaded(id string) *Handle[S, R] {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.handles[id]
}

// All gives the handles that are in memory.
func (l *Ledger[S, R]) All() []*Handle[S, R] {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Collect(maps.Values(l.handles))
}

// Status is what a backend answers to Status.
func (l *Ledger[S, R]) Status(podID, id string) (sandbox.Status, error) {
	h, err := l.Find(podID, id)
	if h == nil {
		return sandbox.Status{State: sandbox.StateAbsent}, err
	}
	s, _ := h.Snapshot()
	return s.Status(), nil
}

// Remove makes a container not exist; one that does not is no error.
func (l *Ledger[S, R]) Remove(podID, id string) error {
	if err := RemoveFile(l.file(podID, id)); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.handles, id)
	return nil
}

// ReportTo says where events go from now on. Until then, and with nil, they go nowhere.
func (l *Ledger[S, R]) ReportTo(sink sandbox.Sink) {
	if sink == nil {
		sink = func(sandbox.Event) {}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sink = sink
}

// Report gives an event to the node.
func (l *Ledger[S, R]) Report(e sandbox.Event) {
	l.mu.Lock()
	sink := l.sink
	l.mu.Unlock()
	sink(e)
}

// keep gives the container's handle, a new one of the given state unless there is one.
func (l *Ledger[S, R]) keep(podID, id string, state S) *Handle[S, R] {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.handles[id]
	if h == nil {
		h = &Handle[S, R]{PodID: podID, ID: id, ledger: l, state: state}
		l.handles[id] = h
	}
	return h
}
