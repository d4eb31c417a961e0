package node

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
)

// Index holds the two maps of seed 1: component name → its running containers, and pod or container ID → component.
//
// The data plane reads the first for every request and the control plane writes it a few times a second, so each
// write publishes a new map and a read is one atomic load.
type Index struct {
	mu      sync.Mutex // serialises writers
	running atomic.Pointer[map[string][]string]
	ids     atomic.Pointer[map[string]string]
}

func newIndex() *Index {
	x := &Index{}
	x.running.Store(&map[string][]string{})
	x.ids.Store(&map[string]string{})
	return x
}

// Running lists the running containers of the component called name. The slice must not be changed.
func (x *Index) Running(name string) []string { return (*x.running.Load())[name] }

// All is the whole map from component names to running containers, as it is now. It must not be changed.
func (x *Index) All() map[string][]string { return *x.running.Load() }

// Component finds the component that the pod or container id runs.
func (x *Index) Component(id string) (name string, ok bool) {
	name, ok = (*x.ids.Load())[id]
	return name, ok
}

// track brings both maps up to the pod's transition from old to next; either may be nil.
func (x *Index) track(old, next *Pod) {
	before, after := presence(old), presence(next)
	if before == after {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if before.name() != after.name() {
		ids := maps.Clone(*x.ids.Load())
		delete(ids, before.id)
		if after.id != "" {
			ids[after.id] = after.component
		}
		x.ids.Store(&ids)
	}
	running := maps.Clone(*x.running.Load())
	if before.running {
		running[before.component] = without(running[before.component], before.id)
	}
	if after.running {
		running[after.component] = append(without(running[after.component], after.id), after.id)
	}
	maps.DeleteFunc(running, func(_ string, ids []string) bool { return len(ids) == 0 })
	x.running.Store(&running)
}

// without is a new slice with all of ids but id.
func without(ids []string, id string) []string {
	return slices.DeleteFunc(slices.Clone(ids), func(other string) bool { return other == id })
}

// trace is what the index holds of one pod.
type trace struct {
	component, id string
	running       bool
}

func (t trace) name() [2]string { return [2]string{t.component, t.id} }

func presence(p *Pod) trace {
	if p == nil || p.State == "" || p.ComponentName() == "" {
		return trace{}
	}
	return trace{component: p.ComponentName(), id: p.ID, running: p.UnitState() == Running}
}
