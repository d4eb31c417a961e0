package node

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// pool is the pod pool of seed 1: every pod of the node by ID, by name and by container.
// Its lock is held for map accesses only, never while anything works.
type pool struct {
	mu         sync.RWMutex
	pods       map[string]*livePod
	names      map[string]*livePod // by podKey
	containers map[string]*livePod // by container ID
	// order lists the pods in the order of their creation; readers take it without the lock.
	order atomic.Pointer[[]*livePod]
}

func newPool() *pool {
	p := &pool{pods: map[string]*livePod{}, names: map[string]*livePod{}, containers: map[string]*livePod{}}
	p.order.Store(&[]*livePod{})
	return p
}

// livePod is a pod of the pool: its record and the slots in which orders work on it.
type livePod struct {
	node    *Node
	id      string
	key     string
	backend sandbox.Backend
	slot    slot

	// mu is held for one transition: read the record, write the next, publish it.
	mu    sync.Mutex
	rec   atomic.Pointer[Pod] // the record
	view  atomic.Pointer[Pod] // what the control planes see of it; nil while it is being made
	slots map[string]*slot    // by containerKey; one slot for all of a unit pod's containers
	exits map[string]sandbox.Status
	gone  bool // removed from the pool
	// unwritten says that the record on the disk is behind rec.
	unwritten bool
}

// reserve finds the pod called key or puts the one that fresh makes under that name.
func (p *pool) reserve(key string, fresh func() *livePod) *livePod {
	p.mu.Lock()
	defer p.mu.Unlock()
	if existing := p.names[key]; existing != nil {
		return existing
	}
	pod := fresh()
	p.names[key] = pod
	p.insert(pod)
	return pod
}

// sort puts the pods into the order of their creation, after they were read in the order of their IDs.
func (p *pool) sort() {
	p.mu.Lock()
	defer p.mu.Unlock()
	order := slices.SortedFunc(slices.Values(*p.order.Load()), func(a, b *livePod) int {
		return a.rec.Load().CreatedAt.Compare(b.rec.Load().CreatedAt)
	})
	p.order.Store(&order)
}

// insert adds pod under its ID. The lock is held.
func (p *pool) insert(pod *livePod) {
	p.pods[pod.id] = pod
	order := append(slices.Clone(*p.order.Load()), pod)
	p.order.Store(&order)
}

// release frees the pod's name, so that a retry makes another pod.
func (p *pool) release(pod *livePod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.names[pod.key] == pod {
		delete(p.names, pod.key)
	}
}

// remove takes pod out of the pool.
func (p *pool) remove(pod *livePod) {
	p.release(pod)
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.pods, pod.id)
	maps.DeleteFunc(p.containers, func(_ string, owner *livePod) bool { return owner == pod })
	order := slices.DeleteFunc(slices.Clone(*p.order.Load()), func(other *livePod) bool { return other == pod })
	p.order.Store(&order)
}

// track brings the containers' index up to the pod's transition from old to next.
func (p *pool) track(pod *livePod, old, next *Pod) {
	var before []string
	if old != nil {
		before = old.containerIDs()
	}
	after := next.containerIDs()
	if slices.Equal(before, after) {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range before {
		delete(p.containers, id)
	}
	for _, id := range after {
		p.containers[id] = pod
	}
}

// containerIDs are the IDs by which the pod's containers are found, whatever their state.
func (p *Pod) containerIDs() []string {
	ids := make([]string, 0, len(p.Previous)+len(p.Containers))
	for _, c := range slices.Concat(p.Previous, p.Containers) {
		ids = append(ids, c.ID)
	}
	return ids
}

// all lists the pods in the order of their creation.
func (p *pool) all() []*livePod { return *p.order.Load() }

// pod finds a pod by its ID or by an unambiguous prefix of it, and a unit pod by that of an attempt as well.
func (p *pool) pod(id string) (*livePod, error) {
	pod, err := lookup(p, p.pods, "pod", id)
	if !errdefs.IsNotFound(err) {
		return pod, err
	}
	if unit, attemptErr := lookup(p, p.containers, "container", id); attemptErr == nil && unit.rec.Load().unit {
		return unit, nil
	}
	return nil, err
}

// container finds the pod of a container by the container's ID or an unambiguous prefix, and that ID in full. The ID of a
// unit pod means its newest attempt.
func (p *pool) container(id string) (*livePod, string, error) {
	pod, err := lookup(p, p.containers, "container", id)
	if errdefs.IsNotFound(err) {
		return p.newestAttempt(id)
	}
	if err != nil {
		return nil, "", err
	}
	for _, c := range pod.rec.Load().Visible() {
		if strings.HasPrefix(c.ID, id) {
			return pod, c.ID, nil
		}
	}
	return nil, "", notFound("container", id)
}

// newestAttempt finds the unit pod id and the ID of its newest attempt.
func (p *pool) newestAttempt(id string) (*livePod, string, error) {
	pod, err := lookup(p, p.pods, "container", id)
	if err != nil {
		return nil, "", err
	}
	rec := pod.rec.Load()
	if c := rec.Container(rec.ID); rec.unit && c != nil {
		return pod, c.ID, nil
	}
	return nil, "", notFound("container", id)
}

// target finds what an order for container id is for: the pod of a container, or a unit pod whose container is removed
// or not there yet.
func (p *pool) target(id string) (pod *livePod, full string, err error) {
	pod, full, err = p.container(id)
	if !errdefs.IsNotFound(err) {
		return pod, full, err
	}
	unit, podErr := p.pod(id)
	if podErr != nil || !unit.rec.Load().unit || unit.view.Load() == nil {
		return nil, "", err
	}
	return unit, unit.id, nil
}

// lookup finds id in one of the pool's maps. Prefixes are for hexadecimal IDs only: component#1 is not component#10.
func lookup(p *pool, in map[string]*livePod, what, id string) (*livePod, error) {
	if id == "" {
		return nil, fmt.Errorf("%s ID is empty: %w", what, errdefs.ErrInvalidArgument)
	}
	p.mu.RLock()
	defer p.mu.RUnlock()
	if pod := in[id]; pod != nil {
		return pod, nil
	}
	var found *livePod
	for full, pod := range in {
		if !strings.HasPrefix(full, id) || !podIDPattern.MatchString(full) {
			continue
		}
		if found != nil {
			return nil, fmt.Errorf("%s ID %q is a prefix of more than one: %w", what, id, errdefs.ErrInvalidArgument)
		}
		found = pod
	}
	if found == nil {
		return nil, notFound(what, id)
	}
	return found, nil
}

func notFound(what, id string) error {
	return fmt.Errorf("%s %q: %w", what, id, errdefs.ErrNotFound)
}

// slotOf finds the slot of a container.
func (p *livePod) slotOf(key string) *slot {
	if p.rec.Load().unit {
		key = ""
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.slots[key]
	if s == nil {
		s = &slot{}
		p.slots[key] = s
	}
	return s
}

// commit makes a transition: change turns a copy of the record into the next one, which is written and then
// published. When change or the write fails, nothing has happened.
func (p *livePod) commit(change func(next *Pod) error) error {
	return p.transition(change, false)
}

// observe records what has happened already (a container ended), and what an order does to end something, which must be possible
// whatever the disk is like: it is published even when it cannot be written. The janitor writes it when that can be done, and the
// next start of the daemon finds the same by asking the backends. The error is change's.
func (p *livePod) observe(change func(next *Pod) error) error {
	return p.transition(change, true)
}

func (p *livePod) transition(change func(next *Pod) error, happened bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone {
		return notFound("pod", p.id)
	}
	next := p.rec.Load().clone()
	if err := change(next); err != nil {
		return err
	}
	raw, err := encodePod(next)
	if err == nil {
		err = p.node.store.Put(kindPod, p.id, raw)
	}
	if err != nil && !happened {
		return err
	}
	if p.unwritten = err != nil; p.unwritten {
		p.node.log.Error("a pod's record cannot be written, to be repeated", "pod", p.id, "err", err)
		p.node.wakeJanitor()
	}
	p.publish(next)
	return nil
}

// isUnwritten tells whether the record on the disk is behind.
func (p *livePod) isUnwritten() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.unwritten
}

// write brings the record on the disk up to date.
func (p *livePod) write() error {
	if !p.isUnwritten() {
		return nil
	}
	if err := p.commit(func(*Pod) error { return nil }); !errdefs.IsNotFound(err) {
		return err
	}
	return nil // it was removed meanwhile
}

// publish shows next to the world: pool, index, views, events. It is the only place where a state changes; mu is held.
func (p *livePod) publish(next *Pod) {
	old := p.rec.Load()
	p.rec.Store(next)
	p.node.pool.track(p, old, next)
	p.node.index.track(old, next)
	oldView := p.view.Load()
	view := viewOf(next)
	p.view.Store(view)
	p.node.events.emit(oldView, view)
}

// viewOf is what the control planes see of the record: no pod that is being made, no container that is not there.
func viewOf(p *Pod) *Pod {
	if p == nil || p.State == "" {
		return nil
	}
	view := *p
	view.Containers = p.made()
	view.unitState = p.UnitState()
	return &view
}

// forget deletes the pod's record and takes it out of the pool.
func (p *livePod) forget() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone {
		return nil
	}
	if err := p.node.store.Delete(kindPod, p.id); err != nil {
		return err
	}
	p.gone = true
	p.node.pool.remove(p)
	p.node.index.track(p.rec.Load(), nil)
	p.node.events.emit(p.view.Load(), nil)
	p.view.Store(nil)
	return nil
}

// isGone reports whether the pod has left the pool.
func (p *livePod) isGone() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.gone
}
