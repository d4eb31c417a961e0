package workerapi

import (
	"slices"
	"sync"
)

// maxQueuedSpans bounds the span batches in an eventQueue.
const maxQueuedSpans = 64

// eventQueue buffers events, so that reading from a connection never waits for the reader of Client.Events.
type eventQueue struct {
	out       chan Event
	wake      chan struct{}
	abandoned chan struct{}
	once      sync.Once

	mu       sync.Mutex
	queue    []Event
	finished bool
}

func newEventQueue() *eventQueue {
	q := &eventQueue{out: make(chan Event), wake: make(chan struct{}, 1), abandoned: make(chan struct{})}
	go q.pump()
	return q
}

// put adds an event. While maxQueuedSpans or more events are queued, each new event with spans replaces the oldest
// queued event with spans.
func (q *eventQueue) put(e Event) {
	q.mu.Lock()
	defer q.mu.Unlock()
	isSpans := func(e Event) bool { return e.Spans != nil }
	if isSpans(e) && len(q.queue) >= maxQueuedSpans {
		if i := slices.IndexFunc(q.queue, isSpans); i >= 0 {
			q.queue = slices.Delete(q.queue, i, i+1)
		}
	}
	q.queue = append(q.queue, e)
	wake(q.wake)
}

// finish makes the method pump close q.out once the queued events are delivered.
func (q *eventQueue) finish() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.finished = true
	wake(q.wake)
}

// abandon ends pump without delivering the queued events.
func (q *eventQueue) abandon() { q.once.Do(func() { close(q.abandoned) }) }

// wake wakes the goroutine that receives from c. The capacity of c is 1.
func wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (q *eventQueue) pump() {
	defer close(q.out)
	for {
		e, ok, finished := q.take()
		if !ok {
			if finished {
				return
			}
			select {
			case <-q.wake:
				continue
			case <-q.abandoned:
				return
			}
		}
		select {
		case q.out <- e:
		case <-q.abandoned:
			return
		}
	}
}

func (q *eventQueue) take() (e Event, ok, finished bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.queue) == 0 {
		return Event{}, false, q.finished
	}
	e = q.queue[0]
	q.queue = q.queue[1:]
	return e, true, false
}
