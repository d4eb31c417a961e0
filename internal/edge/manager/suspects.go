package manager

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

const (
	suspectLosses = 2 // losses after which a module is a suspect
	blameLosses   = 3 // losses after which a suspect that was tried alone is accused
	maxSuspects   = 4 * channel.MaxModules
)

// excuseAfter is how long a module stays on probation after a failed attempt to create it, because the failure may be
// the first sign of the runtime's death.
const excuseAfter = time.Second

// suspects finds the module that makes its runtime die. A runtime that is not durable loses all its modules when it dies,
// and cannot say which one is at fault. So each module that was created less than the time of probation ago gets a loss,
// and all are created again. Modules with suspectLosses are tried in halves, while no other module is on probation: one
// half is created, and the other one held back until the first is through its probation. A suspect whose runtime dies
// while it is tried alone is accused. The next run is the control run: all suspects are held back. If the runtime lives
// for the time of probation, the accused module ends. Otherwise the runtime itself is at fault, and the losses are
// forgotten.
//
//	a b c d ✗   a b c d ✗   a b ✓   c ✗   control ✓   c ended; all others are created
type suspects struct {
	losses  map[string]int     // in a row, by the module's uuid; kept after its end, because its policy may restart it
	fresh   map[string]*module // the modules on probation in this run of the runtime, by uuid
	accused *module            // if set, this run of the runtime is the control run
	blamed  map[string]bool    // the modules among losses that were to blame before, by uuid
}

func newSuspects() suspects {
	return suspects{losses: map[string]int{}, fresh: map[string]*module{}, blamed: map[string]bool{}}
}

func (s *suspects) is(uuid string) bool { return s.losses[uuid] >= suspectLosses }

// lost counts a loss of the runtime, which had these modules. It reports true if the runtime was lost in its control run.
func (s *suspects) lost(modules []*module) (runtimeAtFault bool) {
	if s.accused != nil {
		s.accused = nil
		clear(s.losses)
		clear(s.fresh)
		clear(s.blamed)
		return true
	}
	if len(s.losses) > maxSuspects {
		maps.DeleteFunc(s.losses, func(uuid string, _ int) bool {
			return !slices.ContainsFunc(modules, func(mod *module) bool { return mod.uuid == uuid })
		})
		maps.DeleteFunc(s.blamed, func(uuid string, _ bool) bool { return s.losses[uuid] == 0 })
	}
	modules = slices.DeleteFunc(modules, func(mod *module) bool { return s.fresh[mod.uuid] != mod })
	for _, mod := range modules {
		s.losses[mod.uuid]++
	}
	clear(s.fresh)
	if len(modules) == 1 && s.losses[modules[0].uuid] >= blameLosses {
		s.accused = modules[0]
	}
	return false
}

// convict ends a control run that the runtime has survived. It returns the module to blame. The first time, the module
// explains the losses of the others, and they are forgotten. Later it was tried alone, and another module explains them.
func (s *suspects) convict() *module {
	mod := s.accused
	s.accused = nil
	if !s.blamed[mod.uuid] {
		s.blamed[mod.uuid] = true
		maps.DeleteFunc(s.losses, func(uuid string, _ int) bool { return !s.blamed[uuid] })
	}
	return mod
}

// acquit ends the probation of a module, which has passed it.
func (s *suspects) acquit(uuid string) {
	delete(s.losses, uuid)
	delete(s.fresh, uuid)
	delete(s.blamed, uuid)
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

// countLoss counts the loss of the runtime.
func (h *host) countLoss() {
	h.mu.Lock()
	defer h.mu.Unlock()
	var modules []*module
	for _, mod := range h.all() {
		if mod.state.recorded() == recordCreated {
			modules = append(modules, mod)
		}
	}
	if h.suspects.lost(modules) {
		h.m.log.Warn("edge: runtime died while the suspected modules were held back: no module is blamed", "runtime", h.info.Name)
	}
}

// forgetTrials ends all trials without a result, because the runtime was stopped.
func (h *host) forgetTrials() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.suspects.accused = nil
	clear(h.suspects.fresh)
}

// controlRun ends the accused module, if there is one, unless the runtime is lost within the time of probation.
func (h *host) controlRun(run context.Context) {
	h.mu.Lock()
	accused := h.suspects.accused
	h.mu.Unlock()
	if accused == nil {
		return
	}
	h.m.log.Info("edge: runtime runs without the suspected modules", "runtime", h.info.Name, "module", accused.uuid)
	h.m.wg.Go(func() {
		pause(run, h.m.config.Probation, nil)
		h.blame(run)
	})
}

// blame ends the accused module if its runtime has survived the control run.
func (h *host) blame(run context.Context) {
	var mod *module
	var do action
	var payload []byte
	h.update(func() {
		if !h.alive(run) || h.suspects.accused == nil {
			return
		}
		mod = h.suspects.convict()
		do = mod.apply(evBlamed)
		payload = status(wire.CodeKilled, reasonCrash,
			fmt.Sprintf("the runtime %s died %d times in a row while it ran", h.info.Name, h.suspects.losses[mod.uuid]))
	})
	if do == settle {
		h.settle(mod, payload)
	}
	h.admit()
}

// alive reports whether this run of the runtime goes on. The caller holds h.mu.
func (h *host) alive(run context.Context) bool { return h.up && h.run == run && run.Err() == nil }

// held reports whether a module waits because other suspects are tried first. The caller holds h.mu.
func (h *host) held(mod *module) bool { return mod.waits() && h.suspects.is(mod.uuid) }

// waits reports whether the module is to be created and has no launcher. The caller holds the host's mu.
func (mod *module) waits() bool { return mod.state == pending && !mod.launching }

// onTrial reports whether the loss of the runtime would count against a module, or its launcher is at work. The caller
// holds h.mu.
func (h *host) onTrial(mod *module) bool {
	return h.suspects.fresh[mod.uuid] == mod && mod.state.recorded() != recordExited || mod.launching && !mod.retrying
}

// admit creates the modules that are no longer suspects, and the next suspects if no module is on probation. A suspect
// that is tried with others costs deaths of the runtime that find nothing.
func (h *host) admit() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.up || h.run.Err() != nil {
		return
	}
	var waiting []string
	free := h.suspects.accused == nil
	for _, mod := range h.all() {
		switch {
		case h.held(mod):
			waiting = append(waiting, mod.uuid)
		case mod.waits():
			h.startLauncher(mod)
			free = false
		case h.onTrial(mod):
			free = false
		}
	}
	if !free {
		return
	}
	for _, uuid := range h.suspects.next(waiting) {
		h.startLauncher(h.byUUID[uuid])
	}
}

// beginTrial puts a module on probation before the runtime is asked to create it.
func (h *host) beginTrial(mod *module) {
	if h.info.Durable {
		return // its modules end alone
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.suspects.fresh[mod.uuid] = mod
}

// probation waits until the module has run for the time of probation, and acquits it unless it has ended or the runtime is
// lost before that. A later module with the same uuid has its own probation.
func (h *host) probation(run context.Context, mod *module) {
	if h.info.Durable {
		return
	}
	h.m.wg.Go(func() {
		pause(run, h.m.config.Probation, nil)
		h.mu.Lock()
		if h.alive(run) && h.suspects.fresh[mod.uuid] == mod {
			delete(h.suspects.fresh, mod.uuid)
			if mod.state == running {
				h.suspects.acquit(mod.uuid)
			}
		}
		h.mu.Unlock()
		h.admit()
	})
}

// awaitRetry waits until the next attempt to create a module. After excuseAfter the module is not on probation, and the
// suspects do not wait for it: the attempts may fail for days.
func (h *host) awaitRetry(run context.Context, mod *module, wait time.Duration) {
	waiting, cancel := context.WithCancel(run)
	h.m.wg.Go(func() {
		pause(waiting, min(excuseAfter, wait/2), nil)
		h.mu.Lock()
		if waiting.Err() == nil && h.suspects.fresh[mod.uuid] == mod {
			delete(h.suspects.fresh, mod.uuid)
			mod.retrying = true
		}
		h.mu.Unlock()
		h.admit()
	})
	pause(run, wait, mod.wake)
	h.mu.Lock()
	defer h.mu.Unlock()
	cancel()
	mod.retrying = false
}
