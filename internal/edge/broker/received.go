package broker

import (
	"strconv"
	"strings"

	mochi "github.com/mochi-mqtt/server/v2"
	"github.com/mochi-mqtt/server/v2/packets"
)

// Client and broker choose packet identifiers independently (MQTT 5.0 §2.2.1), but mochi 2.7.9 keeps both in one map. A
// message from a client would thus remove the message with the same identifier that waits for the client, and a
// subscription would be refused. We therefore give each packet from a client an identifier that mochi does not use, and
// keep the state of QoS 2 ourselves.

// hideID replaces the client's identifier of a packet. restoreID puts it into the answer.
func hideID(cl *mochi.Client, pk *packets.Packet) {
	c, ok := cl.Net.Conn.(*conn)
	if !ok || pk.PacketID == 0 { // mochi refuses it
		return
	}
	c.request = pk.PacketID
	id, _ := cl.NextPacketID() // there is always one, because MaxQueued is far less than 65535
	pk.PacketID = uint16(id)
}

func restoreID(cl *mochi.Client, pk packets.Packet) packets.Packet {
	c, ok := cl.Net.Conn.(*conn)
	if !ok {
		return pk
	}
	pk.PacketID = c.request
	if pk.FixedHeader.Type == packets.Pubcomp && c.released { // mochi does not know the message
		pk.ReasonCode, pk.Properties.ReasonString = packets.CodeSuccess.Code, ""
	}
	return pk
}

// receive records that a message with QoS 2 was passed on. Until the client releases the message, the same packet with
// the DUP flag is a duplicate. Without the flag, the client has forgotten the first message, and the packet is a new
// one.
func (h *hooks) receive(cl *mochi.Client, id uint16) {
	h.remember(cl.ID, id)
	if persistent(cl) {
		h.store.put(idKey(receivedKey, cl.ID, id), []byte{}, false)
	}
}

func (h *hooks) remember(client string, id uint16) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.received[client] == nil {
		h.received[client] = map[uint16]struct{}{}
	}
	h.received[client][id] = struct{}{}
}

func (h *hooks) isReceived(client string, id uint16) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, ok := h.received[client][id]
	return ok
}

// release ends the delivery of a message with QoS 2 from a client. The disk has to know it before the client gets
// PUBCOMP, because the client may then use the identifier for another message.
func (h *hooks) release(cl *mochi.Client) {
	c, ok := cl.Net.Conn.(*conn)
	if !ok {
		return
	}
	if c.released = h.isReceived(cl.ID, c.request); !c.released {
		return
	}
	h.mu.Lock()
	delete(h.received[cl.ID], c.request)
	h.mu.Unlock()
	h.store.del(idKey(receivedKey, cl.ID, c.request), true)
	cl.State.Inflight.IncreaseReceiveQuota()
}

// forgetReceived is called when a session ends.
func (h *hooks) forgetReceived(client string) {
	h.mu.Lock()
	ids := h.received[client]
	delete(h.received, client)
	h.mu.Unlock()
	for id := range ids {
		h.store.del(idKey(receivedKey, client, id), false)
	}
}

func (h *hooks) loadReceived() error {
	return h.store.each(receivedKey, func(key string, _ []byte) error {
		client, hex, _ := strings.Cut(key, nul)
		id, err := strconv.ParseUint(hex, 16, 16)
		if _, ok := h.clients[client]; !ok || err != nil {
			h.store.del(receivedKey+key, false)
			return nil
		}
		h.remember(client, uint16(id))
		return nil
	})
}
