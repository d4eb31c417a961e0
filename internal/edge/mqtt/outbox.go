package mqtt

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/packet"
)

// item is one message with QoS 1 or 2 on its way to the broker.
type item struct {
	topic    string
	payload  []byte
	qos      byte
	retain   bool
	seq      uint64
	expires  time.Time
	id       uint16               // packet identifier while in flight
	released bool                 // QoS 2: PUBREC received, PUBCOMP expected
	settled  func(delivered bool) // called when the outbox no longer keeps the message; may be nil
	tries    int                  // consecutive connections that ended early with this message as the oldest in flight
}

func (i *item) settle(delivered bool) {
	if i.settled != nil {
		i.settled(delivered)
	}
}

func (i *item) size() int64 { return int64(len(i.topic) + len(i.payload)) }

// maxTries is the limit of item.tries. A message that reaches the limit is assumed to be the cause of the disconnects,
// for example because it is too large for the broker. The message is dropped, so that it does not block all others.
const maxTries = 8

// outbox holds messages with QoS 1 or 2 for the broker, and the packet identifiers in use.
//
//	add ──▶ pending ──next──▶ flight ──done──▶ (counted)
//	           ▲                 │
//	           └──── resume ─────┘   if the broker has lost the session
type outbox struct {
	limit int
	bytes int64
	ttl   time.Duration

	mu        sync.Mutex
	pending   []*item
	flight    map[uint16]*item
	waiters   map[uint16]chan *packet.Suback // for answers to SUBSCRIBE and UNSUBSCRIBE
	used      int64                          // bytes of pending and flight
	seq       uint64
	lastID    uint16
	offline   bool
	closed    bool
	changed   chan struct{} // closed and replaced when messages leave the outbox or its state changes
	work      chan struct{} // has a token after a message was added or acknowledged
	published uint64
	dropped   uint64
	report    func(l loss, messages int) // logs dropped messages; called with the lock held
}

func newOutbox(limit int, bytes int64, ttl time.Duration, report func(l loss, messages int)) *outbox {
	return &outbox{
		limit: limit, bytes: bytes, ttl: ttl, report: report, offline: true,
		flight: map[uint16]*item{}, waiters: map[uint16]chan *packet.Suback{},
		// Start at random, because the broker may still use identifiers of the previous process.
		lastID:  uint16(rand.Uint32()),
		changed: make(chan struct{}), work: make(chan struct{}, 1),
	}
}

// add queues a message. If there is no room, add waits while the client is connected, and otherwise drops the oldest
// messages that have no function settled. A message with such a function always waits for room.
func (o *outbox) add(ctx context.Context, it *item) error {
	if it.size() > o.bytes {
		return fmt.Errorf("mqtt: a message of %d bytes is larger than the whole queue (%d bytes): %w", it.size(), o.bytes,
			errdefs.ErrResourceExhausted)
	}
	for {
		o.mu.Lock()
		if o.closed {
			o.mu.Unlock()
			return errClosed
		}
		if o.offline && it.settled == nil {
			o.makeRoom(it)
			if !o.fits(it) { // other messages fill the outbox: drop the new one
				o.dropped++
				o.report(loss{it.topic, noRoom}, 1)
				o.mu.Unlock()
				return nil
			}
		}
		if o.fits(it) {
			o.seq++
			it.seq, it.expires = o.seq, time.Now().Add(o.ttl)
			o.pending = append(o.pending, it)
			o.used += it.size()
			o.mu.Unlock()
			o.wake()
			return nil
		}
		changed := o.changed
		o.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("mqtt: the queue of messages for the broker is full (at most %d messages and %d bytes): %w", o.limit, o.bytes,
				ctx.Err())
		}
	}
}

// makeRoom drops the oldest messages without a function settled until the item fits, or there are none.
func (o *outbox) makeRoom(it *item) {
	for n := 0; !o.fits(it) && n < len(o.pending); {
		if o.pending[n].settled != nil {
			n++
			continue
		}
		o.drop(o.pending[n], noRoom)
		o.pending = slices.Delete(o.pending, n, n+1)
	}
}

func (o *outbox) fits(it *item) bool {
	return len(o.pending)+len(o.flight) < o.limit && o.used+it.size() <= o.bytes
}

func (o *outbox) drop(it *item, reason string) {
	o.used -= it.size()
	o.dropped++
	o.report(loss{it.topic, reason}, 1)
	it.settle(false)
}

func (o *outbox) wake() {
	select {
	case o.work <- struct{}{}:
	default:
	}
}

// broadcast wakes callers of add and flush. The caller holds the lock.
func (o *outbox) broadcast() {
	close(o.changed)
	o.changed = make(chan struct{})
}

// next moves the oldest message from the queue into flight. It returns nil if there is none, or if the window is
// already full of messages in flight.
func (o *outbox) next(window int) *item {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.expire(time.Now())
	if len(o.pending) == 0 || len(o.flight) >= window {
		return nil
	}
	it := o.shift()
	it.id = o.freeID()
	o.flight[it.id] = it
	return it
}

// expire drops expired messages, which are at the front of the queue.
func (o *outbox) expire(now time.Time) {
	n := len(o.pending)
	for len(o.pending) > 0 && o.pending[0].expires.Before(now) {
		o.drop(o.shift(), tooOld)
	}
	if len(o.pending) < n {
		o.broadcast()
	}
}

// shift removes the oldest message from the queue.
func (o *outbox) shift() *item {
	it := o.pending[0]
	o.pending[0] = nil
	o.pending = o.pending[1:]
	return it
}

// freeID returns an unused packet identifier. There is always one, because the messages in flight and the waiting
// requests are far fewer than 65535.
func (o *outbox) freeID() uint16 {
	for {
		o.lastID++
		_, inFlight := o.flight[o.lastID]
		_, awaited := o.waiters[o.lastID]
		if o.lastID != 0 && !inFlight && !awaited {
			return o.lastID
		}
	}
}

// wait reserves an identifier for a request, and returns the channel that gets the answer.
func (o *outbox) wait() (uint16, chan *packet.Suback) {
	o.mu.Lock()
	defer o.mu.Unlock()
	id, answer := o.freeID(), make(chan *packet.Suback, 1)
	o.waiters[id] = answer
	return id, answer
}

// forget frees the identifier of a request.
func (o *outbox) forget(id uint16) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.waiters, id)
}

// answer passes an answer to the request that waits for it.
func (o *outbox) answer(p *packet.Suback) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if w, ok := o.waiters[p.ID]; ok {
		delete(o.waiters, p.ID)
		w <- p
	}
}

// release records that the broker has received a message with QoS 2. It reports whether a message with this identifier
// is in flight.
func (o *outbox) release(id uint16) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	it, ok := o.flight[id]
	if ok {
		it.released = true
		it.payload, o.used = nil, o.used-int64(len(it.payload))
	}
	return ok
}

// done removes and returns a message that the broker has acknowledged or, with the code of an error, refused.
func (o *outbox) done(id uint16, code packet.Code) *item {
	o.mu.Lock()
	defer o.mu.Unlock()
	it, ok := o.flight[id]
	if !ok {
		return nil
	}
	delete(o.flight, id)
	switch {
	case code == packet.IDInUse: // in use by the previous process: send the message again with another identifier
		o.pending = slices.Insert(o.pending, 0, it)
	case code.Failed() && !it.released:
		o.drop(it, refused)
	default:
		o.used -= it.size()
		o.published++
		it.settle(true)
	}
	o.broadcast()
	o.wake()
	return it
}

// resume is called after a connect. If the broker has kept the session, resume returns the messages in flight, which
// must be sent again with the same identifiers. Otherwise resume puts them back at the front of the queue, except those
// that the broker has already received.
func (o *outbox) resume(kept bool) []item {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.offline = false
	inFlight := slices.SortedFunc(maps.Values(o.flight), func(a, b *item) int { return int(int64(a.seq) - int64(b.seq)) })
	o.broadcast()
	if kept {
		resend := make([]item, len(inFlight)) // copies, because acknowledgements change the items during the resend
		for i, it := range inFlight {
			resend[i] = *it
		}
		return resend
	}
	queue := inFlight[:0]
	for _, it := range inFlight {
		delete(o.flight, it.id)
		if it.released {
			o.used -= it.size()
			o.published++
			it.settle(true)
			continue
		}
		queue = append(queue, it)
	}
	o.pending = append(queue, o.pending...)
	return nil
}

// disconnected is called after a connection has ended. If disconnected drops a message because of maxTries, it returns
// that message.
func (o *outbox) disconnected(early bool) (poison *item) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.offline = true
	var oldest *item
	for _, it := range o.flight {
		if oldest == nil || it.seq < oldest.seq {
			oldest = it
		}
	}
	if oldest != nil && !early {
		oldest.tries = 0
	} else if oldest != nil {
		if oldest.tries++; oldest.tries >= maxTries && !oldest.released {
			delete(o.flight, oldest.id)
			o.drop(oldest, refused)
			poison = oldest
		}
	}
	o.expire(time.Now())
	o.broadcast()
	return poison
}

// flush waits until the outbox is empty, the connection ends or ctx ends.
func (o *outbox) flush(ctx context.Context) {
	for {
		o.mu.Lock()
		idle, changed := o.offline || len(o.pending)+len(o.flight) == 0, o.changed
		o.mu.Unlock()
		if idle {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// close makes add fail, and counts the remaining messages as dropped, except those that somebody else keeps (item.settled).
func (o *outbox) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	left := map[string]int{}
	for _, it := range append(slices.Collect(maps.Values(o.flight)), o.pending...) {
		if it.settled == nil {
			left[it.topic]++
			o.dropped++
		}
	}
	for topic, n := range left {
		o.report(loss{topic, closing}, n)
	}
	o.pending, o.flight, o.used = nil, map[uint16]*item{}, 0
	o.broadcast()
}

func (o *outbox) stats() (queued int, published, dropped uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.pending) + len(o.flight), o.published, o.dropped
}
