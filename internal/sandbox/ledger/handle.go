package ledger

import (
	"sync"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// Handle represents one container. It holds the container's state, which is also in the state file, and the current
// run, if any.
type Handle[S State, R any] struct {
	PodID, ID string

	ledger *Ledger[S, R]
	mu     sync.Mutex
	state  S
	run    *R
}

// Snapshot returns the state and the current run, which may be nil.
func (h *Handle[S, R]) Snapshot() (S, *R) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state, h.run
}

// Set changes the state in memory and writes the state file. If the write fails, the change in memory remains.
func (h *Handle[S, R]) Set(change func(*S)) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	change(&h.state)
	return h.write(h.state)
}

// Begin makes the given run the current run and changes the state. It writes the state file first. If that fails,
// nothing has changed.
func (h *Handle[S, R]) Begin(run *R, change func(*S)) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	next := h.state
	change(&next)
	if err := h.write(next); err != nil {
		return err
	}
	h.state, h.run = next, run
	return nil
}

// Adopt makes the given run the current run. Recovery calls Adopt for each run that it has found.
func (h *Handle[S, R]) Adopt(run *R) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.run = run
}

// Update is like Set, but does nothing if the given run is no longer the current run. The first result reports whether
// the run is still current.
func (h *Handle[S, R]) Update(run *R, change func(*S)) (bool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.run != run {
		return false, nil
	}
	change(&h.state)
	return true, h.write(h.state)
}

// UpdateInMemory is like Update, but does not write the state file. Use UpdateInMemory for state that recovery can
// rediscover.
func (h *Handle[S, R]) UpdateInMemory(run *R, change func(*S)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.run == run {
		change(&h.state)
	}
}

// End ends the given run, changes the state, and returns the new status and true. If the run has already ended, End
// returns false. If the state file cannot be written, End only logs the error, because the run has ended anyway.
func (h *Handle[S, R]) End(run *R, change func(*S)) (sandbox.Status, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.run != run {
		return sandbox.Status{}, false
	}
	h.run = nil
	change(&h.state)
	if err := h.write(h.state); err != nil {
		h.ledger.log.Error("cannot record that a container ended", "container", h.ID, "err", err)
	}
	return h.state.Status(), true
}

func (h *Handle[S, R]) write(s S) error {
	return h.ledger.format.Write(h.ledger.file(h.PodID, h.ID), s)
}
