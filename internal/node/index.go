package node

import (
	"maps"
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
	if before.id != after.id {
		ids := maps.Clone(*x.ids.Load())
		if after.id != "" {
			ids[after.id] = after.component
		} else {
			delete(ids, before.id)
		}
		x.ids.Store(&ids)
	}
	if before.running != after.running {
		x.publishRunning(max(before.component, after.component), max(before.id, after.id), after.running)
	}
}

// publishRunning puts id into, or takes it out of, the running containers of component.
func (x *Index) publishRunning(component, id string, in bool) {
	running := maps.Clone(*x.running.Load())
	kept := make([]string, 0, len(running[component])+1)
	for _, other := range running[component] {
		if other != id {
			kept = append(kept, other)
		}
	}
	if in {
		kept = append(kept, id)
	}
	if len(kept) == 0 {
		delete(running, component)
	} else {
		running[component] = kept
	}
	x.running.Store(&running)
}

// trace is what the index holds of one pod.
type trace struct {
	component, id string
	running       bool
}

func presence(p *Pod) trace {
	if p == nil || p.Component == "" || p.State == "" {
		return trace{}
	}
	return trace{component: p.Component, id: p.ID, running: p.UnitState() == Running}
}
