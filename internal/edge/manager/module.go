package manager

import (
	"encoding/json"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// phase is what a module does in this daemon; the picture stands in doc.go.
type phase string

const (
	pending  phase = "pending"  // waits for its runtime
	creating phase = "creating" // its runtime has been asked
	running  phase = "running"
	ended    phase = "exited" // its exit is being recorded and told
)

// module is a module of a host. Its fields are the host's to guard, but for box and rate.
type module struct {
	uuid       string
	data       wire.ModuleData
	record     record
	phase      phase
	recorded   bool          // it is on the disk: only then the runtime may hear of it
	known      bool          // the runtime may have it: an earlier daemon created it, or an earlier connection
	lost       bool          // it ran when its runtime was lost
	restored   bool          // the orchestrator may create it once more: it is the same
	unfinished bool          // an exit of an earlier daemon, which did not come to its end
	beginning  bool          // begin is under way
	nudge      chan struct{} // wakes begin; one token
	box        *outbox
	rate       *limiter
}

func (h *host) newModule(uuid string, data wire.ModuleData, r record) *module {
	mod := &module{uuid: uuid, data: data, record: r, phase: pending, nudge: make(chan struct{}, 1), rate: newLimiter(h.m.config.Limits)}
	mod.box = newOutbox(h, r.Index)
	return mod
}

func (mod *module) wake() {
	select {
	case mod.nudge <- struct{}{}:
	default:
	}
}

// add puts a module at the lowest free index (edge protocol, "SLSocket").
func (h *host) add(uuid string, data wire.ModuleData, r record) (*module, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.halted {
		return nil, fmt.Errorf("create module %s: the runtime %s is stopped: create the runtime first: %w", uuid, h.info.Name, errdefs.ErrFailedPrecondition)
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
	return nil, fmt.Errorf("create module %s: the runtime %s has %d modules, which is all that it takes: %w", uuid, h.info.Name, h.info.MaxModules, errdefs.ErrResourceExhausted)
}

// restore puts a recorded module back at its index, for the runtime's next start.
func (h *host) restore(uuid string, r record, data wire.ModuleData) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if r.Index < 0 || r.Index >= h.info.MaxModules || h.byIndex[r.Index].Load() != nil {
		return false
	}
	mod := h.newModule(uuid, data, r)
	mod.recorded, mod.known, mod.restored = true, true, true
	if r.State == exited {
		mod.phase, mod.unfinished = ended, true
	}
	h.byIndex[r.Index].Store(mod)
	h.byUUID[uuid] = mod
	return true
}

// expectAgain lets the orchestrator create each live module once more: it is the same.
func (h *host) expectAgain() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, mod := range h.byUUID {
		mod.restored = true
	}
}

// remove takes a module out of the tables; its index is free.
func (h *host) remove(mod *module) {
	h.update(func() {
		h.byIndex[mod.record.Index].Store(nil)
		delete(h.byUUID, mod.uuid)
	})
}

// at is the module with an index, nil if there is none.
func (h *host) at(index int) *module {
	if index < 0 || index >= len(h.byIndex) {
		return nil
	}
	return h.byIndex[index].Load()
}

// all are the modules, in the order of their indices.
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

// status is the "status" of an exit that the manager itself tells.
func status(code int, reason, message string) []byte {
	s := map[string]any{"code": code, "reason": reason}
	if message != "" {
		s["message"] = message
	}
	return object(map[string]any{"status": s})
}

// Codes of exits that the manager itself tells.
const (
	codeNotCreated = 125 // as container engines tell what they could not start
	codeKilled     = 137
)

// text is a field of a JSON object that is a string.
func text(d wire.ModuleData, name string) string {
	var s string
	if json.Unmarshal(d[name], &s) != nil {
		return ""
	}
	return s
}
