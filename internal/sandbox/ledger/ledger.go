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

// State is what a backend knows about a container. It is a struct that embeds Record, and is stored as JSON in the
// state file. Snapshots are shallow copies, so a change must replace slices and maps instead of editing them.
type State interface {
	Status() sandbox.Status
}

// Ledger owns the handles of a backend's containers, and the sink for the containers' events. S is the type of a
// container's state, R the type of the data about one run.
type Ledger[S State, R any] struct {
	format Format
	file   func(podID, id string) string
	log    *slog.Logger

	mu      sync.Mutex
	sink    sandbox.Sink
	handles map[string]*Handle[S, R]
}

// New returns a ledger whose state files have the given format. The function file returns the path of a container's
// state file.
func New[S State, R any](format Format, file func(podID, id string) string, log *slog.Logger) *Ledger[S, R] {
	return &Ledger[S, R]{format: format, file: file, log: log, sink: func(sandbox.Event) {}, handles: map[string]*Handle[S, R]{}}
}

// Create adds a container in the given state. It writes the state file first. If that fails, the container does not
// exist.
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

// Find returns a container's handle, from memory or from the state file. It returns nil if the container does not
// exist.
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

// Known returns the state of a container, and false if the container does not exist.
func (l *Ledger[S, R]) Known(podID, id string) (state S, known bool, err error) {
	h, err := l.Find(podID, id)
	if h == nil {
		return state, false, err
	}
	state, _ = h.Snapshot()
	return state, true, nil
}

// Get is like Find, but returns errdefs.ErrFailedPrecondition if the container does not exist.
func (l *Ledger[S, R]) Get(podID, id string) (*Handle[S, R], error) {
	h, err := l.Find(podID, id)
	if h == nil && err == nil {
		err = fmt.Errorf("container %s is not created: %w", id, errdefs.ErrFailedPrecondition)
	}
	return h, err
}

// Startable is like Get, but returns nil, nil if the container is already running.
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

// FindRun returns a container's handle and its current run. The run is nil if the container does not run, and both
// results are nil if the container does not exist.
func (l *Ledger[S, R]) FindRun(podID, id string) (*Handle[S, R], *R, error) {
	h, err := l.Find(podID, id)
	if h == nil {
		return nil, nil, err
	}
	_, run := h.Snapshot()
	return h, run, nil
}

// GetRun is like FindRun, but returns errdefs.ErrFailedPrecondition if the container does not run.
func (l *Ledger[S, R]) GetRun(podID, id string) (*Handle[S, R], *R, error) {
	h, run, err := l.FindRun(podID, id)
	if run == nil && err == nil {
		err = fmt.Errorf("container %s is not running: %w", id, errdefs.ErrFailedPrecondition)
	}
	return h, run, err
}

// Loaded returns a container's handle if it is in memory, otherwise nil. For an event from a run, Loaded always finds
// the handle, because every container with a run is in memory.
func (l *Ledger[S, R]) Loaded(id string) *Handle[S, R] {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.handles[id]
}

// All returns the handles that are in memory.
func (l *Ledger[S, R]) All() []*Handle[S, R] {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Collect(maps.Values(l.handles))
}

// Status returns a container's status, as sandbox.Backend.Status does.
func (l *Ledger[S, R]) Status(podID, id string) (sandbox.Status, error) {
	h, err := l.Find(podID, id)
	if h == nil {
		return sandbox.Status{State: sandbox.StateAbsent}, err
	}
	s, _ := h.Snapshot()
	return s.Status(), nil
}

// Remove removes a container's state file and handle. It does nothing if the container does not exist.
func (l *Ledger[S, R]) Remove(podID, id string) error {
	if err := RemoveFile(l.file(podID, id)); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.handles, id)
	return nil
}

// ReportTo sets the sink for all later events; nil discards them. A new ledger discards events.
func (l *Ledger[S, R]) ReportTo(sink sandbox.Sink) {
	if sink == nil {
		sink = func(sandbox.Event) {}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sink = sink
}

// Report passes an event to the sink.
func (l *Ledger[S, R]) Report(e sandbox.Event) {
	l.mu.Lock()
	sink := l.sink
	l.mu.Unlock()
	sink(e)
}

// keep returns the container's handle. If the container has no handle yet, keep adds one with the given state.
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
