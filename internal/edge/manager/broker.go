package manager

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/guard"
)

// Bounds of the queue of messages for the MQTT client. When the queue is full, put waits for outPatience. If there is
// still no room, messages are dropped until half of the queue is free.
const (
	outMessages = 4096
	outBytes    = 64 << 20
	outPatience = 100 * time.Millisecond
	outFirst    = 2 * time.Second // bounds the wait for the first connection
)

// outQueue passes modules' messages, logs and exits to the broker, in order.
type outQueue struct {
	m         *Manager
	queue     *queue[outgoing]
	congested atomic.Bool

	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

type outgoing struct {
	topic   string
	qos     byte
	payload []byte
	module  string               // that sent the message on a channel; otherwise "", and the topic has it
	done    func(error)          // may be nil
	settled func(delivered bool) // see mqtt.Client.PublishThen; may be nil
	flushed chan struct{}        // if set, this is a marker and not a message; closed once the client has all earlier messages
}

func newOutQueue(m *Manager) *outQueue {
	q := &outQueue{m: m, queue: newQueue[outgoing](outMessages, outBytes)}
	q.ctx, q.cancel = context.WithCancel(context.Background())
	return q
}

func (q *outQueue) start() { q.wg.Go(guard.Loop(q.m.log, "edge messages", q.run)) }

// stop stops the queue and counts the remaining messages as dropped.
func (q *outQueue) stop() {
	q.cancel()
	q.wg.Wait()
	q.discard(q.queue.empty())
}

// discard counts and logs messages that leave the queue because the manager is being closed.
func (q *outQueue) discard(all []outgoing) {
	for _, o := range all {
		if o.done != nil {
			o.done(context.Canceled)
		}
	}
	// Messages that are to be settled are kept elsewhere.
	all = slices.DeleteFunc(all, func(o outgoing) bool { return o.flushed != nil || o.settled != nil })
	for l, n := range countBy(all, func(o outgoing) loss { return o.loss("closed") }) {
		q.m.drop(l, n, nil)
	}
}

func (o outgoing) loss(reason string) loss { return loss{reason, o.module, o.topic} }

// publish queues a message of a channel, or drops it. A message that its runtime keeps until it is settled is always queued:
// the runtime bounds their number.
func (q *outQueue) publish(from channel.Key, topic string, qos byte, payload []byte, settled func()) {
	o := outgoing{topic: topic, qos: qos, payload: payload}
	if h := q.m.host(from.Runtime); h != nil {
		if mod := h.at(from.Module); mod != nil {
			o.module = mod.uuid
		}
	}
	if settled != nil {
		o.settled = func(bool) { settled() }
		q.queue.force(o, len(payload))
		return
	}
	q.offer(o)
}

// put queues a message from a runtime that is not of a channel, such as a log line, or drops it.
func (q *outQueue) put(topic string, qos byte, payload []byte) {
	q.offer(outgoing{topic: topic, qos: qos, payload: payload})
}

func (q *outQueue) offer(o outgoing) {
	if _, ok := q.queue.put(o, len(o.payload), false); ok {
		return
	}
	if q.congested.Load() && q.queue.len() > outMessages/2 {
		q.m.drop(o.loss("slow-broker"), 1, nil)
		return
	}
	q.congested.Store(false)
	if !q.wait(o, time.After(outPatience)) {
		q.congested.Store(true)
		q.m.drop(o.loss("slow-broker"), 1, nil)
	}
}

// send queues a message from the manager, and waits for room. The function done learns whether the client has it, and after
// that settled what became of it.
func (q *outQueue) send(topic string, qos byte, payload []byte, done func(error), settled func(delivered bool)) {
	o := outgoing{topic: topic, qos: qos, payload: payload, done: done, settled: settled}
	if !q.wait(o, nil) {
		done(context.Cause(q.ctx))
	}
}

// flush waits until all queued messages have been passed to the client, or until ctx ends.
func (q *outQueue) flush(ctx context.Context) {
	flushed := make(chan struct{})
	dropped, _ := q.queue.put(outgoing{flushed: flushed}, 0, true)
	q.discard(dropped)
	select {
	case <-flushed:
	case <-ctx.Done():
	case <-q.ctx.Done():
	}
}

func (q *outQueue) wait(o outgoing, patience <-chan time.Time) bool {
	for {
		if _, ok := q.queue.put(o, len(o.payload), false); ok {
			poke(q.queue.room) // for other waiters
			return true
		}
		select {
		case <-q.queue.room:
		case <-patience:
			return false
		case <-q.ctx.Done():
			return false
		}
	}
}

func (q *outQueue) run() {
	// Wait a little for the first connection, so that early messages are not lost.
	ctx, cancel := context.WithTimeout(q.m.ctx, outFirst)
	if err := q.m.client.WaitConnected(ctx); err != nil {
		q.m.log.Debug("edge: the broker is not connected yet", "err", err)
	}
	cancel()
	for q.ctx.Err() == nil {
		o, ok := q.queue.take()
		if !ok {
			select {
			case <-q.queue.more:
				continue
			case <-q.ctx.Done():
				return
			}
		}
		if o.flushed != nil {
			close(o.flushed)
			continue
		}
		err := q.m.client.PublishThen(q.ctx, o.topic, o.qos, false, o.payload, o.settled)
		if err != nil && o.done == nil && q.ctx.Err() == nil {
			q.m.drop(o.loss("no-broker"), 1, err)
			if o.settled != nil {
				o.settled(false)
			}
		}
		if o.done != nil {
			o.done(err)
		}
	}
}

// subscriber makes the subscriptions for channels, in order and in the background.
type subscriber struct {
	m    *Manager
	more chan struct{} // has a token while todo may have entries

	mu   sync.Mutex
	todo []subscription
}

type subscription struct {
	filter string
	qos    byte
	remove bool
}

// subscribeTimeout bounds the wait for the broker's answer.
const subscribeTimeout = 10 * time.Second

func newSubscriber(m *Manager) *subscriber { return &subscriber{m: m, more: make(chan struct{}, 1)} }

func (s *subscriber) add(filter string, qos byte) { s.put(subscription{filter: filter, qos: qos}) }
func (s *subscriber) remove(filter string)        { s.put(subscription{filter: filter, remove: true}) }

func (s *subscriber) put(one subscription) {
	s.mu.Lock()
	s.todo = append(s.todo, one)
	s.mu.Unlock()
	poke(s.more)
}

func (s *subscriber) run() {
	for {
		select {
		case <-s.more:
		case <-s.m.ctx.Done():
			return
		}
		s.mu.Lock()
		todo := s.todo
		s.todo = nil
		s.mu.Unlock()
		for _, one := range todo {
			if err := s.do(one); err != nil && s.m.ctx.Err() == nil {
				s.m.refuse("subscribe", "cannot change a channel's subscription", "filter", one.filter, "remove", one.remove, "err", err)
			}
		}
	}
}

func (s *subscriber) do(one subscription) error {
	ctx, cancel := context.WithTimeout(s.m.ctx, subscribeTimeout)
	defer cancel()
	if one.remove {
		return s.m.client.Unsubscribe(ctx, one.filter)
	}
	return s.m.client.Subscribe(ctx, one.filter, one.qos, mqtt.SubscribeOptions{})
}
