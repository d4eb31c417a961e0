package ledger

import (
	"sync"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// Handle is one container: its state, which is that of its file, and its present run if it has one.
type Handle[S State, R any] struct {
	PodID, ID string

	ledger *Ledger[S, R]
	mu     sync.Mutex
	state  S
	run    *R
}

// Snapshot gives the state and the present run, nil for none.
func (h *Handle[S, R]) Snapshot() (S, *R) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state, h.run
}

// Set changes the state. When the file cannot be written, the change holds in memory.
func (h *Handle[S, R]) Set(change func(*S)) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	change(&h.state)
	return h.write(h.state)
}

// Begin makes run the present one, and changes the state on the disk first: when that fails, nothing has changed.
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

// Adopt makes run the present one, which recovery has found.
func (h *Handle[S, R]) Adopt(run *R) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.run = run
}

// Update is Set during a run. It reports whether run is still the present one; otherwise nothing has changed.
func (h *Handle[S, R]) Update(run *R, change func(*S)) (bool, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.run != run {
		return false, nil
	}
	change(&h.state)
	return true, h.write(h.state)
}

// UpdateInMemory changes the state during a run, if run is the present one, in memory only: for what recovery finds out again.
func (h *Handle[S, R]) UpdateInMemory(run *R, change func(*S)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.run == run {
		change(&h.state)
	}
}

// End ends run with a change of the state, unless it has ended already, and reports whether it did. When the file cannot be
// written, that is logged: the run has ended all the same.
func (h *Handle[S, R]) End(run *R, change func(*S)) (sandbox.Status, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.run != run {
		return sandbox.Status{}, false
	}
	h.run = nil
	change(&h.state)
	if err := h.write(h.state); err != nil {
		h.ledger.log.Error("record the end of a container", "container", h.ID, "err", err)
	}
	return h.state.Status(), true
}

func (h *Handle[S, R]) write(s S) error {
	return h.ledger.format.Write(h.ledger.file(h.PodID, h.ID), s)
}
