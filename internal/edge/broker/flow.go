package broker

import (
	"cmp"
	"encoding/binary"
	"slices"
	"sync"

	mochi "github.com/mochi-mqtt/server/v2"
	"github.com/mochi-mqtt/server/v2/packets"
)

// gate keeps to a client's receive maximum (MQTT 5.0 §4.9). mochi 2.7.9 has a way of its own, which puts messages out of order,
// sends all that wait for a session at once, loses what is then not acknowledged, and stands still after twice the maximum; it is
// told that the client has none.
//
//	mochi's resend ─▶ again ─┐
//	                         ├─ enter: fewer than window in flight ─▶ client ─PUBACK, PUBCOMP─▶ leave
//	mochi's WriteLoop ───────┘   (waits for the resend to end)
type gate struct {
	window int

	mu       sync.Mutex
	changed  *sync.Cond
	flight   map[uint16]struct{}
	again    [][]byte // packets of the resend, each whole
	resuming bool
	closed   bool
}

func newGate(window int) *gate {
	g := &gate{window: window, flight: map[uint16]struct{}{}, resuming: true}
	g.changed = sync.NewCond(&g.mu)
	return g
}

// enter waits until one more may be sent. With live, it waits for the end of the resend first.
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

// take keeps a packet of the resend for later. Until the client's session is established, each PUBLISH with the DUP flag is one.
func (g *gate) take(p []byte) bool {
	const publish, dup = packets.Publish << 4, 0x08
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.resuming || p[0]&0xf8 != publish|dup {
		return false
	}
	g.again = append(g.again, slices.Clone(p))
	return true
}

func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	g.changed.Broadcast()
}

// resume sends what was kept, as the client acknowledges it, and lets the live messages go then.
func (c *conn) resume(g *gate) {
	g.mu.Lock()
	again := g.again
	g.mu.Unlock()
	for _, p := range again {
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
	g.again, g.resuming = nil, false
	g.changed.Broadcast()
}

// packetID finds the identifier in an encoded PUBLISH with QoS 1 or 2: behind the length, and the topic with its own.
func packetID(p []byte) uint16 {
	_, n := binary.Uvarint(p[1:])
	topic := 1 + n
	id := topic + 2 + int(binary.BigEndian.Uint16(p[topic:]))
	return binary.BigEndian.Uint16(p[id:])
}

// arrange numbers what waits for a client so that mochi sends it in the order in which it came: it sorts by the last 16 bits of
// Created, which stand for our numbers there.
func (h *hooks) arrange(cl *mochi.Client) {
	waiting := cl.State.Inflight.GetAll(false)
	slices.SortStableFunc(waiting, func(a, b packets.Packet) int { return cmp.Compare(a.Created, b.Created) })
	if slices.IsSortedFunc(waiting, func(a, b packets.Packet) int { return cmp.Compare(uint16(a.Created), uint16(b.Created)) }) {
		return
	}
	// The numbers run over 65535 among them: all are renumbered, behind the next such border.
	base := (h.seq.Load()>>16 + 1) << 16
	h.seq.Store(base + int64(len(waiting)))
	for i, pk := range waiting {
		pk.Created = base + int64(i)
		cl.State.Inflight.Set(pk)
	}
}
