package broker

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	mochi "github.com/mochi-mqtt/server/v2"
	"github.com/mochi-mqtt/server/v2/hooks/storage"
	"github.com/mochi-mqtt/server/v2/packets"

	"github.com/tripod-run/tripod/internal/connlimit"
)

// Keys in the store. MQTT's strings have no NUL, so it parts them.
//
//	c CLIENT                  storage.Client
//	s CLIENT NUL FILTER       storage.Subscription
//	m CLIENT NUL PACKET-ID    storage.Message, for this client
//	r TOPIC                   storage.Message, retained
const (
	clientKey, subKey, messageKey, retainedKey = "c", "s", "m", "r"
	nul                                        = "\x00"
)

// firstNumber of a message is above every time in seconds, which messages that mochi makes by itself carry.
const firstNumber = 1 << 40

// persistent tells whether the session outlives the connection.
func persistent(cl *mochi.Client) bool {
	if cl.Properties.ProtocolVersion >= 5 {
		return cl.Properties.Props.SessionExpiryInterval > 0
	}
	return !cl.Properties.Clean
}

func (h *hooks) save(key string, v any, urgent bool) {
	data, err := json.Marshal(v) // plain structs of mochi's: cannot fail
	if err == nil {
		h.store.put(key, data, urgent)
	}
}

// OnSessionEstablish is called before CONNACK: a session is on the disk when the client learns of it. From here to
// OnSessionEstablished no message goes to anybody, so none goes to the connection before, and none twice.
func (h *hooks) OnSessionEstablish(cl *mochi.Client, pk packets.Packet) {
	if persistent(cl) {
		h.saveClient(cl)
		h.store.wait()
	} else {
		h.store.del(clientKey+cl.ID, false)
	}
	before, known := h.server.Clients.Get(cl.ID)
	if known {
		if c, ok := before.Net.Conn.(*conn); ok {
			c.hurry()
		}
	}
	if c, ok := cl.Net.Conn.(*conn); ok {
		window := h.queued
		if n := int(pk.Connect.WillProperties.ReceiveMaximum); n > 0 {
			window = min(n, window)
		}
		c.gate.Store(newGate(window))
		connlimit.Of(c.Conn).Begin() // until the connection ends
		h.passing.Lock()
		c.unlock = h.passing.Unlock
	}
	if known {
		h.arrange(before)
	}
}

// OnSessionEstablished is called when mochi has sent again what waited for the client; now it really goes.
func (h *hooks) OnSessionEstablished(cl *mochi.Client, _ packets.Packet) {
	if c, ok := cl.Net.Conn.(*conn); ok {
		c.unlocked()
		go c.resume(c.gate.Load())
	}
	if h.closing.Load() { // it may have come too late for disconnect
		_ = h.server.DisconnectClient(cl, packets.ErrServerShuttingDown) // returns the code it was given
	}
}

func (h *hooks) saveClient(cl *mochi.Client) {
	p := cl.Properties.Props
	h.save(clientKey+cl.ID, storage.Client{
		ID: cl.ID, Username: cl.Properties.Username, Listener: cl.Net.Listener, ProtocolVersion: cl.Properties.ProtocolVersion, Clean: cl.Properties.Clean,
		Properties: storage.ClientProperties{
			SessionExpiryInterval: p.SessionExpiryInterval, SessionExpiryIntervalFlag: p.SessionExpiryIntervalFlag,
			ReceiveMaximum: p.ReceiveMaximum, MaximumPacketSize: p.MaximumPacketSize, TopicAliasMaximum: p.TopicAliasMaximum, User: p.User,
		},
	}, true)
}

// OnSubscribed is called before SUBACK.
func (h *hooks) OnSubscribed(cl *mochi.Client, pk packets.Packet, codes []byte) {
	if !persistent(cl) {
		return
	}
	for i, f := range pk.Filters {
		if i < len(codes) && codes[i] <= 2 {
			h.save(subKey+cl.ID+nul+f.Filter, storage.Subscription{
				Client: cl.ID, Filter: f.Filter, Qos: codes[i], Identifier: f.Identifier, NoLocal: f.NoLocal,
				RetainHandling: f.RetainHandling, RetainAsPublished: f.RetainAsPublished,
			}, true)
		}
	}
	h.store.wait()
}

// OnUnsubscribed forgets subscriptions.
func (h *hooks) OnUnsubscribed(cl *mochi.Client, pk packets.Packet) {
	for _, f := range pk.Filters {
		h.store.del(subKey+cl.ID+nul+f.Filter, false)
	}
}

// OnQosPublish stores each message with QoS 1 or 2 for a client, and the PUBREC that keeps a message from the client from counting twice.
func (h *hooks) OnQosPublish(cl *mochi.Client, pk packets.Packet, _ int64, _ int) {
	if pk.FixedHeader.Type == packets.Publish && pk.Created < firstNumber { // a will
		pk.Created = h.seq.Add(1)
		cl.State.Inflight.Set(pk)
	}
	if !persistent(cl) || pk.FixedHeader.Type == packets.Puback {
		return
	}
	if !h.remember(cl.ID, pk) {
		// One who is there still gets it, once; for one who is away it is dropped.
		cl.State.Inflight.Delete(pk.PacketID)
		h.dropped.Add(1)
		return
	}
	h.save(inflightKey(cl.ID, pk.PacketID), message(pk), cl.Closed())
}

// waiting is what waits for a client with a session: sizes in bytes, by packet identifier.
type waiting struct {
	sizes map[uint16]int64
	total int64
}

// remember notes a message for a client; false when it would be too much.
func (h *hooks) remember(client string, pk packets.Packet) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	w := h.stored[client]
	if w == nil {
		w = &waiting{sizes: map[uint16]int64{}}
		h.stored[client] = w
	}
	size := int64(len(pk.TopicName) + len(pk.Payload))
	before, known := w.sizes[pk.PacketID]
	if !known && w.total+size > h.bytes {
		return false
	}
	w.sizes[pk.PacketID] = size
	w.total += size - before
	return true
}

func inflightKey(client string, id uint16) string {
	return messageKey + client + nul + strconv.FormatUint(uint64(id), 16)
}

func message(pk packets.Packet) storage.Message {
	p := pk.Properties
	return storage.Message{
		PacketID: pk.PacketID, Origin: pk.Origin, FixedHeader: pk.FixedHeader, TopicName: pk.TopicName, Payload: pk.Payload, Created: pk.Created,
		Properties: storage.MessageProperties{
			PayloadFormat: p.PayloadFormat, PayloadFormatFlag: p.PayloadFormatFlag, MessageExpiryInterval: p.MessageExpiryInterval,
			ContentType: p.ContentType, ResponseTopic: p.ResponseTopic, CorrelationData: p.CorrelationData,
			SubscriptionIdentifier: p.SubscriptionIdentifier, User: p.User,
		},
	}
}

// OnQosComplete forgets a message that has arrived.
func (h *hooks) OnQosComplete(cl *mochi.Client, pk packets.Packet) { h.forget(cl.ID, pk.PacketID) }

// OnQosDropped forgets one that was given up.
func (h *hooks) OnQosDropped(cl *mochi.Client, pk packets.Packet) { h.forget(cl.ID, pk.PacketID) }

func (h *hooks) forget(client string, id uint16) {
	h.mu.Lock()
	known := false
	if w := h.stored[client]; w != nil {
		var size int64
		size, known = w.sizes[id]
		w.total -= size
		delete(w.sizes, id)
	}
	h.mu.Unlock()
	if known {
		h.store.del(inflightKey(client, id), false)
	}
}

// OnRetainMessage stores a retained message (kept is 1), or removes one (-1).
func (h *hooks) OnRetainMessage(_ *mochi.Client, pk packets.Packet, kept int64) {
	switch urgent := pk.FixedHeader.Qos > 0; kept {
	case 1:
		h.save(retainedKey+pk.TopicName, message(pk), urgent)
	case -1:
		h.store.del(retainedKey+pk.TopicName, urgent)
	}
}

// OnRetainedExpired forgets a retained message whose time is over.
func (h *hooks) OnRetainedExpired(topic string) { h.store.del(retainedKey+topic, false) }

// OnDisconnect ends what ends with the connection. Until mochi has done so too, no session goes to another connection: mochi
// looks whether it was taken over, and then deletes whoever has the client identifier.
func (h *hooks) OnDisconnect(cl *mochi.Client, _ error, expire bool) {
	if c, ok := cl.Net.Conn.(*conn); ok && c.unlock == nil {
		h.passing.RLock()
		c.unlock = h.passing.RUnlock
	}
	if cl.IsTakenOver() { // the session goes on, or OnSessionEstablish of the one who came has ended it
		return
	}
	if expire {
		h.store.del(clientKey+cl.ID, false)
		return
	}
	// A message that mochi drops for a slow client is dropped without a word.
	h.mu.Lock()
	var gone []uint16
	if w := h.stored[cl.ID]; w != nil {
		for id := range w.sizes {
			if _, waits := cl.State.Inflight.Get(id); !waits {
				gone = append(gone, id)
			}
		}
	}
	h.mu.Unlock()
	for _, id := range gone {
		h.forget(cl.ID, id)
	}
}

// OnClientExpired ends a session that nobody has come back for. mochi forgets the client, but not his subscriptions.
func (h *hooks) OnClientExpired(cl *mochi.Client) {
	h.server.UnsubscribeClient(cl)
	cl.ClearInflights()
	h.store.del(clientKey+cl.ID, false)
	h.mu.Lock()
	delete(h.stored, cl.ID)
	h.mu.Unlock()
}

// StoredClients is asked first when the broker starts.
func (h *hooks) StoredClients() (all []storage.Client, err error) {
	h.clients = map[string]struct{}{}
	err = load(h, clientKey, func(c storage.Client) bool {
		h.clients[c.ID] = struct{}{}
		all = append(all, c)
		return true
	})
	return all, err
}

// StoredSubscriptions is asked next; what belongs to no session is left over from one, and removed.
func (h *hooks) StoredSubscriptions() (all []storage.Subscription, err error) {
	err = load(h, subKey, func(s storage.Subscription) bool {
		_, ok := h.clients[s.Client]
		if ok {
			all = append(all, s)
		}
		return ok
	})
	return all, err
}

// StoredInflightMessages is asked then.
func (h *hooks) StoredInflightMessages() (all []storage.Message, err error) {
	err = h.store.each(messageKey, func(key string, value []byte) error {
		var m storage.Message
		client, _, _ := strings.Cut(key, nul)
		if _, ok := h.clients[client]; !ok || json.Unmarshal(value, &m) != nil || m.PacketID == 0 {
			h.store.del(messageKey+key, false)
			return nil
		}
		m.Client = client
		h.seq.Store(max(h.seq.Load(), m.Created))
		h.remember(client, m.ToPacket())
		all = append(all, m)
		return nil
	})
	return all, err
}

// StoredRetainedMessages is asked last.
func (h *hooks) StoredRetainedMessages() (all []storage.Message, err error) {
	err = load(h, retainedKey, func(m storage.Message) bool {
		h.seq.Store(max(h.seq.Load(), m.Created))
		all = append(all, m)
		return true
	})
	return all, err
}

// load reads all values of a kind; what cannot be read, or is not wanted, is removed.
func load[T any](h *hooks, prefix string, want func(T) bool) error {
	err := h.store.each(prefix, func(key string, value []byte) error {
		var v T
		if err := json.Unmarshal(value, &v); err != nil {
			h.Log.Error("broker: a stored value cannot be read and is left out", "key", prefix+key, "err", err)
		} else if want(v) {
			return nil
		}
		h.store.del(prefix+key, false)
		return nil
	})
	if err != nil {
		return fmt.Errorf("broker: %w", err)
	}
	return nil
}
