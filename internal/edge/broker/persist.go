package broker

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"

	mochi "github.com/mochi-mqtt/server/v2"
	"github.com/mochi-mqtt/server/v2/hooks/storage"
	"github.com/mochi-mqtt/server/v2/packets"

	"github.com/tripod-run/tripod/internal/connlimit"
)

// Keys in the store. NUL separates their parts, because MQTT strings cannot contain it.
//
//	c CLIENT                  storage.Client
//	s CLIENT NUL FILTER       storage.Subscription
//	m CLIENT NUL PACKET-ID    storage.Message, for this client; a PUBREL once the client has the message
//	q CLIENT NUL PACKET-ID    nothing: a message with QoS 2 by this client that was passed on and not yet released
//	r TOPIC                   storage.Message, retained
//
// Before the key q, the PUBREC of such a message was stored with the key m.
const (
	clientKey, subKey, messageKey, receivedKey, retainedKey = "c", "s", "m", "q", "r"
	nul                                                     = "\x00"
)

// firstNumber is the first sequence number. Messages made by mochi have a time in seconds in the same field, and
// firstNumber is larger than any such time.
const firstNumber = 1 << 40

// persistent reports whether the session outlives the connection.
func persistent(cl *mochi.Client) bool {
	if cl.Properties.ProtocolVersion >= 5 {
		return cl.Properties.Props.SessionExpiryInterval > 0
	}
	return !cl.Properties.Clean
}

func (h *hooks) save(key string, v any, urgent bool) {
	data, err := json.Marshal(v) // cannot fail for mochi's plain structs
	if err == nil {
		h.store.put(key, data, urgent)
	}
}

// OnSessionEstablish is called before CONNACK, so a session is on the disk before the client learns of the session.
// Until OnSessionEstablished no message is delivered, so no message goes to the previous connection, and none is sent
// twice.
func (h *hooks) OnSessionEstablish(cl *mochi.Client, pk packets.Packet) {
	if persistent(cl) {
		h.saveClient(cl)
		h.store.wait()
	} else {
		h.store.del(clientKey+cl.ID, false)
	}
	previous, known := h.server.Clients.Get(cl.ID)
	if known {
		if c, ok := previous.Net.Conn.(*conn); ok {
			c.limitWrites()
		}
	}
	if c, ok := cl.Net.Conn.(*conn); ok {
		window := h.queued
		if n := int(pk.Connect.WillProperties.ReceiveMaximum); n > 0 {
			window = min(n, window)
		}
		c.gate.Store(newGate(window))
		connlimit.Of(c.Conn).Begin() // the connection is busy until it ends
		h.delivery.Lock()
		c.unlockDelivery = h.delivery.Unlock
		if session := h.foreign(cl); session != nil { // another user was faster by a moment; its session is inherited empty
			h.server.UnsubscribeClient(session)
			session.ClearInflights()
		}
	}
	if !known || pk.Connect.Clean || !persistent(previous) {
		h.forgetReceived(cl.ID)
	}
	if known {
		h.renumber(previous)
	}
}

// OnSessionEstablished is called after mochi's resend. It starts sending the messages that the gate held back during
// the resend.
func (h *hooks) OnSessionEstablished(cl *mochi.Client, _ packets.Packet) {
	if c, ok := cl.Net.Conn.(*conn); ok {
		c.endDelivery()
		go c.resume(c.gate.Load())
	}
	if h.closing.Load() { // disconnect may have missed the client
		_ = h.server.DisconnectClient(cl, packets.ErrServerShuttingDown) // returns its argument
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

// OnSubscribed stores subscriptions. It is called before SUBACK.
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

// OnUnsubscribed removes subscriptions from the store.
func (h *hooks) OnUnsubscribed(cl *mochi.Client, pk packets.Packet) {
	for _, f := range pk.Filters {
		h.store.del(subKey+cl.ID+nul+f.Filter, true)
	}
}

// OnQosPublish stores a message with QoS 1 or 2 for a client. With QoS 2, the message has to be on the disk before the
// client gets it: the client takes a later message with the same identifier for a duplicate, until it gets a PUBREL.
func (h *hooks) OnQosPublish(cl *mochi.Client, pk packets.Packet, _ int64, _ int) {
	switch pk.FixedHeader.Type {
	case packets.Puback:
		return
	case packets.Pubrec: // of a message from the client; see receive
		cl.State.Inflight.Delete(pk.PacketID)
		atomic.AddInt64(&h.server.Info.Inflight, -1)
		return
	case packets.Publish:
		if pk.Created < firstNumber { // a will
			pk.Created = h.seq.Add(1)
			cl.State.Inflight.Set(pk)
		}
	}
	resent := pk.FixedHeader.Dup || pk.FixedHeader.Type == packets.Pubrel
	if !persistent(cl) || resent && h.isStored(cl.ID, pk.PacketID) {
		return
	}
	if !h.reserve(cl.ID, pk) {
		// If the client is connected, it still gets the message, but not again after a reconnect. If the client is
		// disconnected, the message is lost.
		cl.State.Inflight.Delete(pk.PacketID)
		h.dropped.Add(1)
		return
	}
	h.save(idKey(messageKey, cl.ID, pk.PacketID), message(pk), cl.Closed() || pk.FixedHeader.Qos == 2)
}

// taken stores a PUBREL in place of a message with QoS 2 that the client has received. The PUBREL has to be on the disk
// before the client gets it: from then on, the client takes the same message for a new one.
func (h *hooks) taken(cl *mochi.Client, id uint16) {
	if !h.isStored(cl.ID, id) {
		return
	}
	pk := packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Pubrel, Qos: 1}, PacketID: id, Created: h.seq.Add(1)}
	h.reserve(cl.ID, pk)
	h.save(idKey(messageKey, cl.ID, id), message(pk), true)
}

// queueSizes holds the sizes, in bytes, of the messages queued for a persistent session, by packet identifier.
type queueSizes struct {
	sizes map[uint16]int64
	total int64
}

// reserve adds a message to the queue's size. It reports false, and adds nothing, if the queue would become too large.
func (h *hooks) reserve(client string, pk packets.Packet) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	w := h.stored[client]
	if w == nil {
		w = &queueSizes{sizes: map[uint16]int64{}}
		h.stored[client] = w
	}
	size := int64(len(pk.TopicName) + len(pk.Payload))
	previous, known := w.sizes[pk.PacketID]
	if !known && w.total+size > h.bytes {
		return false
	}
	w.sizes[pk.PacketID] = size
	w.total += size - previous
	return true
}

// isStored reports whether a message for a client was given to the store.
func (h *hooks) isStored(client string, id uint16) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.stored[client] == nil {
		return false
	}
	_, ok := h.stored[client].sizes[id]
	return ok
}

func idKey(kind, client string, id uint16) string {
	return kind + client + nul + strconv.FormatUint(uint64(id), 16)
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

// OnQosComplete removes an acknowledged message from the store.
func (h *hooks) OnQosComplete(cl *mochi.Client, pk packets.Packet) { h.forget(cl.ID, pk.PacketID) }

// OnQosDropped removes a dropped message from the store.
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
		h.store.del(idKey(messageKey, client, id), false)
	}
}

// OnRetainMessage stores a retained message (change is 1), or removes it (-1).
func (h *hooks) OnRetainMessage(_ *mochi.Client, pk packets.Packet, change int64) {
	switch urgent := pk.FixedHeader.Qos > 0; change {
	case 1:
		h.save(retainedKey+pk.TopicName, message(pk), urgent)
	case -1:
		h.store.del(retainedKey+pk.TopicName, urgent)
	}
}

// OnRetainedExpired removes an expired retained message from the store.
func (h *hooks) OnRetainedExpired(topic string) { h.store.del(retainedKey+topic, false) }

// OnDisconnect removes a session that ends with its connection, and forgets dropped messages. It holds a read lock on
// hooks.delivery until mochi has finished, so that no session changes its connection meanwhile. mochi first checks for
// a takeover, and then deletes the client by its identifier. Without the lock, mochi could thus delete the new client.
func (h *hooks) OnDisconnect(cl *mochi.Client, _ error, expire bool) {
	if c, ok := cl.Net.Conn.(*conn); ok && c.unlockDelivery == nil {
		h.delivery.RLock()
		c.unlockDelivery = h.delivery.RUnlock
	}
	if cl.IsTakenOver() { // the session continues, or OnSessionEstablish of the new connection has removed it
		return
	}
	if expire {
		h.store.del(clientKey+cl.ID, false)
		h.forgetReceived(cl.ID)
		return
	}
	// mochi calls no hook when it drops a message for a slow client, so find the dropped messages here.
	h.mu.Lock()
	var dropped []uint16
	if w := h.stored[cl.ID]; w != nil {
		for id := range w.sizes {
			if _, queued := cl.State.Inflight.Get(id); !queued {
				dropped = append(dropped, id)
			}
		}
	}
	h.mu.Unlock()
	for _, id := range dropped {
		h.forget(cl.ID, id)
	}
}

// OnClientExpired removes an expired session. mochi removes the client, but not its subscriptions.
func (h *hooks) OnClientExpired(cl *mochi.Client) {
	h.server.UnsubscribeClient(cl)
	cl.ClearInflights()
	h.forgetReceived(cl.ID)
	h.store.del(clientKey+cl.ID, false)
	h.mu.Lock()
	delete(h.stored, cl.ID)
	h.mu.Unlock()
}

// StoredClients loads the sessions, and removes those of users that are not configured any more, or that were begun when
// there were no users. When the broker starts, mochi calls StoredClients first, and then the three
// functions below, in the order of this file.
func (h *hooks) StoredClients() (all []storage.Client, err error) {
	h.clients = map[string]string{}
	err = load(h, clientKey, func(c storage.Client) bool {
		if !h.users.known(string(c.Username)) {
			h.Log.Warn("broker: removing the session of a user that is not configured", "client", c.ID, "user", string(c.Username))
			return false
		}
		h.clients[c.ID] = string(c.Username)
		all = append(all, c)
		return true
	})
	return all, err
}

// StoredSubscriptions loads the subscriptions, and removes those without a session.
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

// StoredInflightMessages loads the queued messages and the identifiers of received ones, and removes those without a
// session, and the messages that the session's user may not read any more.
func (h *hooks) StoredInflightMessages() (all []storage.Message, err error) {
	if err := h.loadReceived(); err != nil {
		return nil, err
	}
	err = h.store.each(messageKey, func(key string, value []byte) error {
		var m storage.Message
		client, _, _ := strings.Cut(key, nul)
		user, ok := h.clients[client]
		if !ok || json.Unmarshal(value, &m) != nil || m.PacketID == 0 || m.FixedHeader.Type == packets.Publish && !h.users.allowed(user, client, m.TopicName, false) {
			h.store.del(messageKey+key, false)
			return nil
		}
		if m.FixedHeader.Type == packets.Pubrec {
			h.store.del(messageKey+key, false)
			h.remember(client, m.PacketID)
			h.store.put(idKey(receivedKey, client, m.PacketID), []byte{}, false)
			return nil
		}
		m.Client = client
		h.seq.Store(max(h.seq.Load(), m.Created))
		h.reserve(client, m.ToPacket())
		all = append(all, m)
		return nil
	})
	return all, err
}

// StoredRetainedMessages loads the retained messages.
func (h *hooks) StoredRetainedMessages() (all []storage.Message, err error) {
	err = load(h, retainedKey, func(m storage.Message) bool {
		h.seq.Store(max(h.seq.Load(), m.Created))
		all = append(all, m)
		return true
	})
	return all, err
}

// load passes every stored value of a kind to the given function. It removes a value from the store if the value is
// unreadable, or if the function returns false.
func load[T any](h *hooks, prefix string, want func(T) bool) error {
	err := h.store.each(prefix, func(key string, value []byte) error {
		var v T
		if err := json.Unmarshal(value, &v); err != nil {
			h.Log.Error("broker: removing an unreadable value from the store", "key", prefix+key, "err", err)
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
