package node

import (
	"maps"
	"slices"
	"sync"
	"sync/atomic"
)

// Index holds the two maps of seed 1: component name → running containers, and pod or container ID → component.
//
// The data plane reads the first map for every request; the control plane writes it a few times a second. Each write
// therefore publishes a new map, and a read is one atomic load.
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

// Running lists the running containers of a component. Callers must not change the slice.
func (x *Index) Running(name string) []string { return (*x.running.Load())[name] }

// All returns the map from component names to running containers. Callers must not change it.
func (x *Index) All() map[string][]string { return *x.running.Load() }

// Component returns the component that runs in the pod or container with the given ID.
func (x *Index) Component(id string) (name string, ok bool) {
	name, ok = (*x.ids.Load())[id]
	return name, ok
}

// update applies a pod's transition to both maps. The old or the next record can be nil.
func (x *Index) update(old, next *Pod) {
	before, after := entryOf(old), entryOf(next)
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

// without returns a copy of the slice, but leaves out the given ID.
func without(ids []string, id string) []string {
	return slices.DeleteFunc(slices.Clone(ids), func(other string) bool { return other == id })
}

// indexEntry is a pod's entry in the index.
type indexEntry struct {
	component, id string
	running       bool
}

func (t indexEntry) name() [2]string { return [2]string{t.component, t.id} }

func entryOf(p *Pod) indexEntry {
	if p == nil || p.State == "" || p.ComponentName() == "" {
		return indexEntry{}
	}
	return indexEntry{component: p.ComponentName(), id: p.ID, running: p.UnitState() == Running}
}
