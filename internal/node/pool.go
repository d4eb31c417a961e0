package node

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// pool is the pod pool of seed 1: every pod of the node by ID, by name and by container. Its lock is held only while
// the maps are accessed.
type pool struct {
	mu         sync.RWMutex
	pods       map[string]*livePod
	names      map[string]*livePod // by podKey
	containers map[string]*livePod // by container ID
	// order lists the pods in order of creation; readers load the list without the lock.
	order atomic.Pointer[[]*livePod]
}

func newPool() *pool {
	p := &pool{pods: map[string]*livePod{}, names: map[string]*livePod{}, containers: map[string]*livePod{}}
	p.order.Store(&[]*livePod{})
	return p
}

// livePod is a pod in the pool: its record, and the slots for its orders.
type livePod struct {
	node    *Node
	id      string
	key     string
	backend sandbox.Backend
	slot    slot

	// mu serialises transitions. Each transition reads the record, writes the next one and publishes it.
	mu    sync.Mutex
	rec   atomic.Pointer[Pod] // the record
	view  atomic.Pointer[Pod] // the record for control planes; nil while the pod is being made
	slots map[string]*slot    // by containerKey; a unit pod's containers share one
	gone  bool                // removed from the pool
	// unwritten means that the record on disk is older than rec.
	unwritten bool
}

// reserve returns the pod with the given key. If there is none, it adds and returns the pod that newPod makes. While
// newPod runs, no other pod is added.
func (p *pool) reserve(key string, newPod func() (*livePod, error)) (*livePod, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if existing := p.names[key]; existing != nil {
		return existing, nil
	}
	pod, err := newPod()
	if err != nil {
		return nil, err
	}
	p.names[key] = pod
	p.insert(pod)
	return pod, nil
}

// sort puts the pods into order of creation, because the store returns them in order of ID.
func (p *pool) sort() {
	p.mu.Lock()
	defer p.mu.Unlock()
	order := slices.SortedFunc(slices.Values(*p.order.Load()), func(a, b *livePod) int {
		return a.rec.Load().CreatedAt.Compare(b.rec.Load().CreatedAt)
	})
	p.order.Store(&order)
}

// insert adds pod under its ID. The caller holds the lock.
func (p *pool) insert(pod *livePod) {
	p.pods[pod.id] = pod
	order := append(slices.Clone(*p.order.Load()), pod)
	p.order.Store(&order)
}

// release frees the pod's name, so that a retry makes a new pod.
func (p *pool) release(pod *livePod) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.names[pod.key] == pod {
		delete(p.names, pod.key)
	}
}

func (p *pool) remove(pod *livePod) {
	p.release(pod)
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.pods, pod.id)
	maps.DeleteFunc(p.containers, func(_ string, owner *livePod) bool { return owner == pod })
	order := slices.DeleteFunc(slices.Clone(*p.order.Load()), func(other *livePod) bool { return other == pod })
	p.order.Store(&order)
}

// update applies a pod's transition to the index of containers. The old record can be nil.
func (p *pool) update(pod *livePod, old, next *Pod) {
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

// containerIDs lists the IDs of the pod's containers in any state, and of its previous attempts.
func (p *Pod) containerIDs() []string {
	ids := make([]string, 0, len(p.Previous)+len(p.Containers))
	for _, c := range slices.Concat(p.Previous, p.Containers) {
		ids = append(ids, c.ID)
	}
	return ids
}

// all lists the pods in order of creation.
func (p *pool) all() []*livePod { return *p.order.Load() }

// pod finds a pod by its ID or a unique prefix of it. It also finds a unit pod by the ID of one of its attempts.
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

// container finds the pod and the full ID of a container by ID or unique prefix. A unit pod's ID means its newest
// attempt.
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

// target finds the pod and the full ID for an order that concerns a container. The ID can also be that of a unit pod
// whose container has been removed or has not been created yet.
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

// lookup finds an ID in one of the pool's maps. Only hexadecimal IDs can be abbreviated, because component#1 is a
// prefix of component#10 but names another pod.
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
		if !strings.HasPrefix(full, id) || !podIDPattern().MatchString(full) {
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

// commit makes a transition. It calls change with a copy of the record, then writes and publishes that copy. If change
// or the write fails, the record stays as it was. A change that returns errUnchanged writes nothing.
func (p *livePod) commit(change func(next *Pod) error) error {
	return p.transition(change, p.node.store.Put, false)
}

// intend is like commit, for an intent: a daemon that is killed finds it, but it need not survive the machine, because
// nothing that the intent announces goes on after a reboot.
func (p *livePod) intend(change func(next *Pod) error) error {
	return p.transition(change, p.node.store.Draft, false)
}

// observe is like commit, but publishes the record even if it cannot write it. It is for events that have already
// happened, such as a container's exit, and for stops, which must work even if the disk is full. The janitor writes the
// record later; after a restart the backends report the same events again. observe returns errors from change, but not
// from the write.
func (p *livePod) observe(change func(next *Pod) error) error {
	return p.transition(change, p.node.store.Put, true)
}

// announce is intend for stops: it publishes the record even if it cannot write it.
func (p *livePod) announce(change func(next *Pod) error) error {
	return p.transition(change, p.node.store.Draft, true)
}

// errUnchanged is what the change of a transition returns if there is nothing to change.
var errUnchanged = errors.New("unchanged")

func (p *livePod) transition(change func(next *Pod) error, write func(kind, key string, value []byte) error, happened bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.gone {
		return notFound("pod", p.id)
	}
	next := p.rec.Load().clone()
	if err := change(next); errors.Is(err, errUnchanged) {
		return nil
	} else if err != nil {
		return err
	}
	raw, err := encodePod(next)
	if err == nil {
		err = write(kindPod, p.id, raw)
	}
	if err != nil && !happened {
		return err
	}
	if p.unwritten = err != nil; p.unwritten {
		p.node.log.Error("write of a pod's record failed and will be retried", "pod", p.id, "err", err)
		p.node.wakeJanitor()
	}
	p.publish(next)
	return nil
}

func (p *livePod) isUnwritten() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.unwritten
}

// write writes the record if the record on disk is older.
func (p *livePod) write() error {
	if !p.isUnwritten() {
		return nil
	}
	if err := p.commit(func(*Pod) error { return nil }); !errdefs.IsNotFound(err) {
		return err
	}
	return nil // removed in the meantime
}

// publish makes the next record visible in the pool, the index, the view and the events. Only publish changes states.
// The caller holds mu.
func (p *livePod) publish(next *Pod) {
	old := p.rec.Load()
	p.rec.Store(next)
	p.node.pool.update(p, old, next)
	p.node.index.update(old, next)
	oldView := p.view.Load()
	view := viewOf(next)
	p.view.Store(view)
	p.node.events.emit(oldView, view)
	p.announceStops(old, next)
}

// viewOf returns the record as control planes see it, with only the containers that exist. It returns nil for a pod
// that is being made.
func viewOf(p *Pod) *Pod {
	if p == nil || p.State == "" {
		return nil
	}
	view := *p
	view.Containers = p.present()
	view.unitState = p.UnitState()
	return &view
}

// forget deletes the pod's record and removes it from the pool.
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
	p.node.index.update(p.rec.Load(), nil)
	p.node.events.emit(p.view.Load(), nil)
	p.view.Store(nil)
	return nil
}

func (p *livePod) isGone() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.gone
}
