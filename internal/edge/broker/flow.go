package broker

import (
	"cmp"
	"encoding/binary"
	"slices"
	"sync"

	mochi "github.com/mochi-mqtt/server/v2"
	"github.com/mochi-mqtt/server/v2/packets"
)

// gate enforces a client's receive maximum (MQTT 5.0 §4.9). mochi 2.7.9 has its own implementation with four faults. It
// reorders messages, sends all queued messages of a session in one burst, loses messages that are not acknowledged, and
// stalls after twice the maximum. We therefore hide the client's maximum from mochi (OnPacketRead).
//
//	mochi's resend ─▶ resend ─┐
//	                          ├─ enter: fewer than window in flight ─▶ client ─PUBACK, PUBCOMP─▶ leave
//	mochi's WriteLoop ────────┘   (waits for the resend to end)
type gate struct {
	window int

	mu       sync.Mutex
	changed  *sync.Cond
	flight   map[uint16]struct{}
	resend   [][]byte // packets that mochi sends again, each complete
	resuming bool
	closed   bool
}

func newGate(window int) *gate {
	g := &gate{window: window, flight: map[uint16]struct{}{}, resuming: true}
	g.changed = sync.NewCond(&g.mu)
	return g
}

// enter waits until another message fits in the window, and reports whether the gate is open. If live is set, it first
// waits for the end of the resend.
func (g *gate) enter(id uint16, live bool) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	for !g.closed && (live && g.resuming || len(g.flight) >= g.window) {
		g.changed.Wait()
	}
	g.flight[id] = struct{}{}
	return !g.closed
}

func (g *gate) leave(id uint16) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.flight, id)
	g.changed.Broadcast()
}

// take keeps p for later if p is part of the resend, that is, a PUBLISH with the DUP flag that arrives before resume
// has ended.
func (g *gate) take(p []byte) bool {
	const publish, dup = packets.Publish << 4, 0x08
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.resuming || p[0]&0xf8 != publish|dup {
		return false
	}
	g.resend = append(g.resend, slices.Clone(p))
	return true
}

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	g.changed.Broadcast()
}

// resume sends the kept packets as fast as the client acknowledges them, and then opens the gate for live messages.
func (c *conn) resume(g *gate) {
	c.store.wait() // a message with QoS 2 is sent only once it is on the disk
	g.mu.Lock()
	resend := g.resend
	g.mu.Unlock()
	for _, p := range resend {
		if !g.enter(packetID(p), false) {
			return
		}
		c.wait()
		if _, err := c.pass(p); err != nil {
			return
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.resend, g.resuming = nil, false
	g.changed.Broadcast()
}

// packetID returns the packet identifier of an encoded PUBLISH with QoS 1 or 2. The identifier follows the packet's
// length, the topic's length and the topic.
func packetID(p []byte) uint16 {
	_, n := binary.Uvarint(p[1:])
	topic := 1 + n
	id := topic + 2 + int(binary.BigEndian.Uint16(p[topic:]))
	return binary.BigEndian.Uint16(p[id:])
}

// renumber makes mochi send a client's queued messages in the order of their arrival. mochi sorts them by the lowest 16
// bits of Created, which holds our sequence number.
func (h *hooks) renumber(cl *mochi.Client) {
	waiting := cl.State.Inflight.GetAll(false)
	slices.SortStableFunc(waiting, func(a, b packets.Packet) int { return cmp.Compare(a.Created, b.Created) })
	if slices.IsSortedFunc(waiting, func(a, b packets.Packet) int { return cmp.Compare(uint16(a.Created), uint16(b.Created)) }) {
		return
	}
	// The lowest 16 bits overflow within the queue. Number all messages from the next multiple of 65536.
	base := (h.seq.Load()>>16 + 1) << 16
	h.seq.Store(base + int64(len(waiting)))
	for i, pk := range waiting {
		pk.Created = base + int64(i)
		cl.State.Inflight.Set(pk)
	}
}
