package ledger

import (
	"sync"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// Handle is one container: its state, as in its state file, and its current run, if any.
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

// Set changes the state in memory and writes the file. If the write fails, the change in memory remains.
func (h *Handle[S, R]) Set(change func(*S)) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	change(&h.state)
	return h.write(h.state)
}

// Begin makes run the current run and changes the state. It writes the file first; if that fails, nothing has changed.
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

// Adopt makes run the current run. Recovery calls it for a run that it found.
func (h *Handle[S, R]) Adopt(run *R) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.run = run
}

// Update is like Set, but does nothing unless run is still the current run. It reports whether run is current.
func (h *Handle[S, R]) Update(run *R, change func(*S)) (bool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.run != run {
		return false, nil
	}
	change(&h.state)
	return true, h.write(h.state)
}

// UpdateInMemory is like Update, but does not write the file. Use it for state that recovery can rediscover.
func (h *Handle[S, R]) UpdateInMemory(run *R, change func(*S)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.run == run {
		change(&h.state)
	}
}

// End ends run, changes the state, and returns the new status and true. If run has already ended, End returns false. If
// the file cannot be written, End logs the error, because the run has ended anyway.
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
