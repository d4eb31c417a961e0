package node

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// eventBuffer is how many events a subscriber can lag behind before its subscription ends.
const eventBuffer = 4096

// recentEvents is how many events the node remembers.
const recentEvents = 512

// Event reports a transition that has an event in CRI v1, the progress of a compilation, or that a container runs slower
// than it could. An event of the sandbox itself has the sandbox's ID in both ID fields.
type Event struct {
	Type        runtimeapi.ContainerEventType
	ContainerID string
	PodID       string
	At          time.Time
	// Compilation is set in events about the compilation of an image's component. They have no other fields but At.
	Compilation *sandbox.Compilation
	// Fallback is why the container runs slower than it could. Such an event is no transition and has no Type.
	Fallback string
	// Restored says which firewall rules of pods were missing and made again. Such an event has no other fields but At.
	Restored string
	// Pod is the pod after the transition or, if the transition removed the pod, its last snapshot.
	Pod *Pod
}

// hub sends every event to every subscriber, in the order of the transitions, and remembers the latest.
type hub struct {
	mu     sync.Mutex
	subs   map[*Subscription]struct{}
	recent []Event
	closed bool
}

type Subscription struct {
	hub    *hub
	events chan Event
	err    error
}

// Events returns the channel of events. The channel is closed when Close is called, when the node closes, or when the
// subscriber falls more than 4096 events behind. Err returns the reason.
func (s *Subscription) Events() <-chan Event { return s.events }

// Err returns the reason why the channel was closed: nil after Close, errdefs.ErrResourceExhausted for a subscriber
// that lagged behind, errdefs.ErrUnavailable when the node closed.
func (s *Subscription) Err() error {
	s.hub.mu.Lock()
	defer s.hub.mu.Unlock()
	return s.err
}

func (s *Subscription) Close() { s.hub.end(s, nil) }

func newHub() *hub { return &hub{subs: map[*Subscription]struct{}{}} }

// subscribe returns a subscription, which begins with the recent events if they are wanted.
func (h *hub) subscribe(recent bool) *Subscription {
	s := &Subscription{hub: h, events: make(chan Event, eventBuffer)}
	h.mu.Lock()
	defer h.mu.Unlock()
	if recent {
		for _, e := range h.recent {
			s.events <- e
		}
	}
	h.subs[s] = struct{}{}
	if h.closed {
		h.endLocked(s, errNodeClosed)
	}
	return s
}

// latest returns the recent events.
func (h *hub) latest() []Event {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.recent)
}

func (h *hub) end(s *Subscription, why error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.endLocked(s, why)
}

func (h *hub) endLocked(s *Subscription, why error) {
	if _, ok := h.subs[s]; !ok {
		return
	}
	delete(h.subs, s)
	s.err = why
	close(s.events)
}

func (h *hub) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for s := range h.subs {
		h.endLocked(s, errNodeClosed)
	}
}

// emit queues the events of a pod's transition for every subscriber.
func (h *hub) emit(old, next *Pod) {
	h.send(transitionEvents(old, next))
}

// send queues events for every subscriber. It never blocks; instead, it ends a subscription whose buffer is full.
func (h *hub) send(events []Event) {
	if len(events) == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.recent = append(h.recent, events...)
	if excess := len(h.recent) - recentEvents; excess > 0 {
		h.recent = slices.Delete(h.recent, 0, excess)
	}
	for s := range h.subs {
		for _, e := range events {
			select {
			case s.events <- e:
				continue
			default:
			}
			h.endLocked(s, fmt.Errorf("the subscriber is %d events behind: %w", eventBuffer, errdefs.ErrResourceExhausted))
			break
		}
	}
}

// transitionEvents compares two snapshots of a pod; nil means that the pod does not exist.
func transitionEvents(old, next *Pod) []Event {
	at := time.Now()
	var events []Event
	add := func(t runtimeapi.ContainerEventType, podID, containerID string, snapshot *Pod) {
		events = append(events, Event{Type: t, ContainerID: containerID, PodID: podID, At: at, Pod: snapshot})
	}
	if old == nil && next != nil {
		add(runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT, next.ID, next.ID, next)
		add(runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT, next.ID, next.ID, next)
	}
	if old != nil {
		after := cmp.Or(next, &Pod{})
		for _, c := range old.Visible() {
			if after.Container(c.ID) == nil {
				add(runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT, old.ID, c.ID, cmp.Or(next, old))
			}
		}
	}
	if next != nil {
		before := cmp.Or(old, &Pod{})
		for _, c := range next.Containers {
			for _, t := range containerEvents(before.Container(c.ID), c) {
				add(t, next.ID, c.ID, next)
			}
		}
		if old != nil && old.State == Initiated && next.State == Killed {
			add(runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT, next.ID, next.ID, next)
		}
	}
	if old != nil && next == nil {
		add(runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT, old.ID, old.ID, old)
	}
	return events
}

// containerEvents returns the events of one container's transition; old is nil for a new container.
func containerEvents(old, next *Container) []runtimeapi.ContainerEventType {
	var events []runtimeapi.ContainerEventType
	if old == nil {
		events = append(events, runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT)
		old = &Container{}
	}
	switch {
	case next.State == Running && old.State != Running:
		events = append(events, runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT)
	case next.State == Stopped && old.State != Stopped:
		events = append(events, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
	}
	return events
}
