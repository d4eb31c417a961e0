package broker

import (
	"cmp"
	"slices"
	"sync"

	mochi "github.com/mochi-mqtt/server/v2"
	"github.com/mochi-mqtt/server/v2/packets"
)

// flow mends how mochi 2.7.9 keeps to a client's receive maximum (MQTT 5.0 §4.9). What is over it waits in mochi's Inflight with
// Expiry -1; when there is room it is sent, and forgotten at once. So its acknowledgement does not count, the room is never given
// back and the client gets no more after twice its maximum; and it is lost when the connection breaks before the acknowledgement.
// Here such messages are remembered, and are put back into Inflight when they are acknowledged or the session goes on.
type flow struct {
	mu  sync.Mutex
	out map[*mochi.Client]map[uint16]packets.Packet
}

func (f *flow) sent(cl *mochi.Client, pk packets.Packet) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.out == nil {
		f.out = map[*mochi.Client]map[uint16]packets.Packet{}
	}
	if f.out[cl] == nil {
		f.out[cl] = map[uint16]packets.Packet{}
	}
	pk.Expiry = 0
	f.out[cl][pk.PacketID] = pk
}

// recall puts a message back whose acknowledgement has come.
func (f *flow) recall(cl *mochi.Client, id uint16) {
	f.mu.Lock()
	pk, ok := f.out[cl][id]
	delete(f.out[cl], id)
	f.mu.Unlock()
	if ok {
		cl.State.Inflight.Set(pk)
	}
}

// end puts all of a client's back: it is gone, or its session is taken over.
func (f *flow) end(cl *mochi.Client) {
	f.mu.Lock()
	left := f.out[cl]
	delete(f.out, cl)
	f.mu.Unlock()
	for _, pk := range left {
		cl.State.Inflight.Set(pk)
	}
}

// arrange prepares what waits for a client to be sent again in the order in which it came. mochi sorts by the last 16 bits of
// Created, which stand for our numbers there.
func (h *hooks) arrange(cl *mochi.Client) {
	h.flow.end(cl)
	waiting := cl.State.Inflight.GetAll(false)
	slices.SortStableFunc(waiting, func(a, b packets.Packet) int { return cmp.Compare(a.Created, b.Created) })
	base := int64(-1)
	if !slices.IsSortedFunc(waiting, func(a, b packets.Packet) int { return cmp.Compare(uint16(a.Created), uint16(b.Created)) }) {
		// The numbers run over 65535 among them: all are numbered anew, behind the next such border.
		base = (h.seq.Load()>>16 + 1) << 16
		h.seq.Store(base + int64(len(waiting)))
	}
	for i, pk := range waiting {
		if base >= 0 {
			pk.Created = base + int64(i)
		}
		pk.Expiry = max(pk.Expiry, 0) // all are sent now; none is held back
		cl.State.Inflight.Set(pk)
	}
}
