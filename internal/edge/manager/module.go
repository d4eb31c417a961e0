package manager

import (
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// module is a module of a host. The host's mu guards state, record, problem, repeatable, launching
// and retrying.
type module struct {
	uuid       string
	data       wire.ModuleData
	record     record
	state      state
	problem    problem
	repeatable bool          // the next create message for this uuid counts as a repetition
	launching  bool          // the launcher is running
	retrying   bool          // the launcher waits for the next attempt, and suspects do not wait for it
	wake       chan struct{} // a token wakes the launcher
	box        *outbox
	rate       *limiter
	log        *runLog
	logs       map[int]bool // channels that are a log, too; only host.receive uses it
}

func (h *host) newModule(uuid string, data wire.ModuleData, r record) *module {
	mod := &module{uuid: uuid, data: data, record: r, state: unrecorded, wake: make(chan struct{}, 1), rate: newLimiter(h.m.config.Limits),
		log: newRunLog()}
	mod.box = newOutbox(h, r.Index, mod.uuid)
	return mod
}

// add puts a module at the lowest free index.
func (h *host) add(uuid string, data wire.ModuleData, r record) (*module, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.halted {
		return nil, fmt.Errorf("create module %s: the runtime %s is stopped: create the runtime first: %w", uuid, h.info.Name,
			errdefs.ErrFailedPrecondition)
	}
	for index := range h.info.MaxModules {
		if h.byIndex[index].Load() != nil {
			continue
		}
		r.Index = index
		mod := h.newModule(uuid, data, r)
		h.byIndex[index].Store(mod)
		h.byUUID[uuid] = mod
		return mod, nil
	}
	return nil, fmt.Errorf("create module %s: the runtime %s has %d modules, which is the limit: %w", uuid, h.info.Name, h.info.MaxModules,
		errdefs.ErrResourceExhausted)
}

// restore puts a recorded module back at its index. It reports false if the index is in use or the record is invalid.
func (h *host) restore(uuid string, r record, data wire.ModuleData) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if loaded[r.State] == "" || r.Index < 0 || r.Index >= h.info.MaxModules || h.byIndex[r.Index].Load() != nil {
		return false
	}
	mod := h.newModule(uuid, data, r)
	mod.state, mod.repeatable = loaded[r.State], true
	mod.log.cut = true
	h.byIndex[r.Index].Store(mod)
	h.byUUID[uuid] = mod
	return true
}

// allowRepeats allows one more create message for each module, because the orchestrator may believe that the modules
// are lost.
func (h *host) allowRepeats() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, mod := range h.byUUID {
		mod.repeatable = true
	}
}

// remove removes a module from the tables, which frees its index. Suspects may have waited for the module.
func (h *host) remove(mod *module) {
	h.update(func() {
		h.byIndex[mod.record.Index].Store(nil)
		delete(h.byUUID, mod.uuid)
	})
	h.admit()
}

// at returns the module at an index, or nil.
func (h *host) at(index int) *module {
	if index < 0 || index >= len(h.byIndex) {
		return nil
	}
	return h.byIndex[index].Load()
}

// all returns the modules, sorted by index.
func (h *host) all() []*module {
	var list []*module
	for i := range h.byIndex {
		if mod := h.byIndex[i].Load(); mod != nil {
			list = append(list, mod)
		}
	}
	return list
}

func (h *host) key(mod *module, fd int) channel.Key {
	return channel.Key{Runtime: h.info.UUID, Module: mod.record.Index, FD: fd}
}

// status returns the payload of an exit that the manager itself reports.
func status(code int, reason, message string) []byte {
	s := map[string]any{"code": code, "reason": reason}
	if message != "" {
		s["message"] = message
	}
	return object(map[string]any{"status": s})
}

// reasonCrash is the reason of the exit of a module that has made its runtime die again and again.
const reasonCrash = "runtime-crash"
