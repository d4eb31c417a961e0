package mqtt

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/mochi-mqtt/server/v2/packets"
)

// item is one message with QoS 1 or 2 on its way to the broker.
type item struct {
	topic    string
	payload  []byte
	qos      byte
	retain   bool
	seq      uint64
	expires  time.Time
	id       uint16 // packet identifier while in flight
	released bool   // QoS 2: the broker has the message (PUBREC), PUBCOMP is awaited
	tries    int    // short-lived connections on which it was the oldest in flight
}

func (i *item) size() int64 { return int64(len(i.topic) + len(i.payload)) }

// maxTries is on how many connections in a row, each lost within moments, one message may be the oldest in flight. Then it is
// taken for the reason (a broker that disconnects for its size, say) and dropped, so it does not keep all others from passing.
const maxTries = 8

// outbox holds what waits for the broker with QoS 1 or 2, and the packet identifiers in use.
//
//	add ──▶ pending ──next──▶ flight ──done──▶ (counted)
//	           ▲                 │
//	           └───── lost ──────┘   the broker has forgotten the session
type outbox struct {
	limit int
	bytes int64
	ttl   time.Duration

	mu        sync.Mutex
	pending   []*item
	flight    map[uint16]*item
	waiters   map[uint16]chan packets.Packet // SUBSCRIBE and UNSUBSCRIBE that wait for their answer
	used      int64                          // bytes of pending and flight
	seq       uint64
	lastID    uint16
	away      bool
	closed    bool
	changed   chan struct{} // closed and replaced when there may be room or the state has changed
	work      chan struct{} // something to send, or a free identifier
	published uint64
	dropped   uint64
}

func newOutbox(limit int, bytes int64, ttl time.Duration) *outbox {
	return &outbox{
		limit: limit, bytes: bytes, ttl: ttl, away: true,
		flight: map[uint16]*item{}, waiters: map[uint16]chan packets.Packet{},
		// A broker may remember identifiers of the process before this one.
		lastID:  uint16(rand.Uint32()),
		changed: make(chan struct{}), work: make(chan struct{}, 1),
	}
}

// add takes a message, and waits for room while the broker is there.
func (o *outbox) add(ctx context.Context, it *item) error {
	if it.size() > o.bytes {
		return fmt.Errorf("mqtt: a message of %d bytes is larger than the whole queue (%d bytes): %w", it.size(), o.bytes, errdefs.ErrResourceExhausted)
	}
	for {
		o.mu.Lock()
		if o.closed {
			o.mu.Unlock()
			return errClosed
		}
		if o.away {
			for !o.fits(it) && len(o.pending) > 0 {
				o.drop(o.shift())
			}
			if !o.fits(it) { // all of it is in flight: the newest has to go
				o.dropped++
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
			return fmt.Errorf("mqtt: %d messages wait for the broker, and no room came: %w", o.limit, ctx.Err())
		}
	}
}

func (o *outbox) fits(it *item) bool {
	return len(o.pending)+len(o.flight) < o.limit && o.used+it.size() <= o.bytes
}

func (o *outbox) drop(it *item) {
	o.used -= it.size()
	o.dropped++
}

func (o *outbox) wake() {
	select {
	case o.work <- struct{}{}:
	default:
	}
}

// broadcast tells all that wait in add and flush. The caller holds the lock.
func (o *outbox) broadcast() {
	close(o.changed)
	o.changed = make(chan struct{})
}

// next moves the oldest message into flight; nil when there is none, or as many as window are in flight already.
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

// expire drops what has waited too long. Messages are in the order of their arrival, so the old ones are in front.
func (o *outbox) expire(now time.Time) {
	n := len(o.pending)
	for len(o.pending) > 0 && o.pending[0].expires.Before(now) {
		o.drop(o.shift())
	}
	if len(o.pending) < n {
		o.broadcast()
	}
}

// shift takes the oldest message out of the queue.
func (o *outbox) shift() *item {
	it := o.pending[0]
	o.pending[0] = nil
	o.pending = o.pending[1:]
	return it
}

// freeID finds an identifier that is not in use. There is one: the window and the waiters are far below 65535.
func (o *outbox) freeID() uint16 {
	for {
		o.lastID++
		_, flying := o.flight[o.lastID]
		_, waiting := o.waiters[o.lastID]
		if o.lastID != 0 && !flying && !waiting {
			return o.lastID
		}
	}
}

// wait takes an identifier for a request and gives the channel that its answer comes on.
func (o *outbox) wait() (uint16, chan packets.Packet) {
	o.mu.Lock()
	defer o.mu.Unlock()
	id, answer := o.freeID(), make(chan packets.Packet, 1)
	o.waiters[id] = answer
	return id, answer
}

// forget gives the identifier of a request back.
func (o *outbox) forget(id uint16) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.waiters, id)
}

// answer passes an answer on to the request that waits for it.
func (o *outbox) answer(pk packets.Packet) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if w, ok := o.waiters[pk.PacketID]; ok {
		delete(o.waiters, pk.PacketID)
		w <- pk
	}
}

// release notes that the broker has a message of QoS 2; false when none of this identifier is in flight.
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

// done ends a message: it is with the broker, or, with a reason of 0x80 or more, refused by it. It returns the message.
func (o *outbox) done(id uint16, reason byte) *item {
	o.mu.Lock()
	defer o.mu.Unlock()
	it, ok := o.flight[id]
	if !ok {
		return nil
	}
	delete(o.flight, id)
	switch {
	case reason == packets.ErrPacketIdentifierInUse.Code: // by the process before this one: once more, under another one
		o.pending = slices.Insert(o.pending, 0, it)
	case reason >= 0x80 && !it.released:
		o.drop(it)
	default:
		o.used -= it.size()
		o.published++
	}
	o.broadcast()
	o.wake()
	return it
}

// resume is called when a connection has come up. With the session kept it returns what was in flight, to be sent again under
// the same identifiers; with the session lost, that goes back to the front of the queue.
func (o *outbox) resume(kept bool) []item {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.away = false
	flying := make([]*item, 0, len(o.flight))
	for _, it := range o.flight {
		flying = append(flying, it)
	}
	slices.SortFunc(flying, func(a, b *item) int { return int(int64(a.seq) - int64(b.seq)) })
	o.broadcast()
	if kept {
		again := make([]item, len(flying)) // copies: acknowledgements come while they are sent
		for i, it := range flying {
			again[i] = *it
		}
		return again
	}
	again := flying[:0]
	for _, it := range flying {
		delete(o.flight, it.id)
		if it.released {
			o.used -= it.size()
			o.published++
			continue
		}
		again = append(again, it)
	}
	o.pending = append(again, o.pending...)
	return nil
}

// lost is called when a connection has gone. It returns a message that is dropped because it ends each connection.
func (o *outbox) lost(early bool) (poison *item) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.away = true
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
			o.drop(oldest)
			poison = oldest
		}
	}
	o.expire(time.Now())
	o.broadcast()
	return poison
}

// flush waits until nothing is left, or the connection is gone.
func (o *outbox) flush(ctx context.Context) {
	for {
		o.mu.Lock()
		idle, changed := o.away || len(o.pending)+len(o.flight) == 0, o.changed
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

// close lets nothing in any more and counts what is left as dropped.
func (o *outbox) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	o.dropped += uint64(len(o.pending) + len(o.flight))
	o.pending, o.flight, o.used = nil, map[uint16]*item{}, 0
	o.broadcast()
}

func (o *outbox) stats() (queued int, published, dropped uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.pending) + len(o.flight), o.published, o.dropped
}
