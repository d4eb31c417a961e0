package manager

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/tripod-run/tripod/internal/channel"
)

const (
	suspectLosses = 2 // losses after which a module is a suspect
	blameLosses   = 3 // losses after which a suspect that was tried alone ends
	maxSuspects   = 4 * channel.MaxModules
)

// suspects finds the module that makes its runtime die. A runtime that is not durable loses all its modules when it dies,
// and cannot say which one is at fault. So each module that was created less than the time of probation ago gets a loss,
// and all are created again. Modules with suspectLosses are tried in halves: one half is created, and the other one held
// back until the first is through its probation. A suspect whose runtime dies while nothing else is on probation ends.
//
//	a b c d ✗   a b c d ✗   a b ✓   c ✗   c ended; all others are created
type suspects struct {
	losses map[string]int  // in a row, by the module's uuid; kept after its end, because its policy may restart it
	fresh  map[string]bool // the modules on probation in this run of the runtime
}

func newSuspects() suspects { return suspects{losses: map[string]int{}, fresh: map[string]bool{}} }

func (s *suspects) is(uuid string) bool { return s.losses[uuid] >= suspectLosses }

// lost counts a loss of the runtime, which had these modules, and returns the module to blame, or "".
func (s *suspects) lost(modules []string) (blamed string) {
	if len(s.losses) > maxSuspects {
		maps.DeleteFunc(s.losses, func(uuid string, _ int) bool { return !slices.Contains(modules, uuid) })
	}
	modules = slices.DeleteFunc(modules, func(uuid string) bool { return !s.fresh[uuid] })
	for _, uuid := range modules {
		s.losses[uuid]++
	}
	clear(s.fresh)
	if len(modules) != 1 || s.losses[modules[0]] < blameLosses {
		return ""
	}
	blamed = modules[0]
	maps.DeleteFunc(s.losses, func(uuid string, _ int) bool { return uuid != blamed })
	return blamed
}

// acquit ends the probation of a module, which has passed it.
func (s *suspects) acquit(uuid string) {
	delete(s.losses, uuid)
	delete(s.fresh, uuid)
}

// next returns which of the suspects to try next: half of those with the most losses.
func (s *suspects) next(held []string) []string {
	most := 0
	for _, uuid := range held {
		most = max(most, s.losses[uuid])
	}
	held = slices.DeleteFunc(held, func(uuid string) bool { return s.losses[uuid] < most })
	return held[:(len(held)+1)/2]
}

// blame counts the loss of the runtime and returns the uuid of the module to blame, or "".
func (h *host) blame() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var modules []string
	for _, mod := range h.all() {
		if mod.state.recorded() == recordCreated {
			modules = append(modules, mod.uuid)
		}
	}
	return h.suspects.lost(modules)
}

// crashStatus returns the payload of the exit of a module that is to blame.
func (h *host) crashStatus(uuid string) []byte {
	h.mu.Lock()
	defer h.mu.Unlock()
	return status(codeKilled, reasonCrash, fmt.Sprintf("the runtime %s died %d times in a row while it ran", h.info.Name, h.suspects.losses[uuid]))
}

// held reports whether a module waits because other suspects are tried first. The caller holds h.mu.
func (h *host) held(mod *module) bool {
	return mod.state == pending && !mod.launching && h.suspects.is(mod.uuid)
}

// admit creates the next suspects if none is on probation.
func (h *host) admit() {
	h.mu.Lock()
	defer h.mu.Unlock()
	var waiting []string
	for _, mod := range h.all() {
		switch {
		case h.held(mod):
			waiting = append(waiting, mod.uuid)
		case h.suspects.is(mod.uuid) && (mod.launching || h.suspects.fresh[mod.uuid]):
			return
		}
	}
	if !h.up {
		return
	}
	for _, uuid := range h.suspects.next(waiting) {
		h.startLauncher(h.byUUID[uuid])
	}
}

// probation waits until the module has been in the runtime for the time of probation, and acquits it unless the runtime
// is lost before that.
func (h *host) probation(run context.Context, mod *module) {
	if h.info.Durable {
		return // its modules end alone
	}
	h.mu.Lock()
	h.suspects.fresh[mod.uuid] = true
	h.mu.Unlock()
	h.m.wg.Go(func() {
		pause(run, h.m.config.Probation, nil)
		h.mu.Lock()
		passed := run.Err() == nil && h.up
		if passed {
			h.suspects.acquit(mod.uuid)
		}
		h.mu.Unlock()
		if passed {
			h.admit()
		}
	})
}
