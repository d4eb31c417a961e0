package broker

import (
	"bytes"
	"slices"
	"sync"
	"sync/atomic"

	mochi "github.com/mochi-mqtt/server/v2"
	"github.com/mochi-mqtt/server/v2/packets"
)

// bridgeBit is a bit of the protocol level. In MQTT 3.1 and 3.1.1, clients set it to ask for No Local, which is an
// extension by mosquitto.
const bridgeBit = 0x80

// bridgeMark marks a client that has set bridgeBit. It is stored with the session as a user property. MQTT 3.1.1 has no
// user properties, so the client has not sent any itself.
var bridgeMark = packets.UserProperty{Key: "tripod.bridge"}

// emptyMark marks a will without a payload until the will is published.
var emptyMark = packets.UserProperty{Key: "tripod.empty"}

// hooks implements mochi's hooks. All hooks are in one type, so that their order within an event is clear.
type hooks struct {
	mochi.HookBase
	server *mochi.Server
	users  *users
	store  *store
	limit  uint32 // maximum size of a packet, in bytes
	queued int    // limit of messages for one client
	bytes  int64  // limit of queued bytes for one persistent session

	closing                  atomic.Bool
	refused, denied, dropped atomic.Uint64

	seq      atomic.Int64 // of messages, in Packet.Created
	delivery sync.RWMutex // read-locked while a message goes to its receivers, locked while a session changes its connection
	mu       sync.Mutex
	stored   map[string]*queueSizes         // by client
	received map[string]map[uint16]struct{} // messages with QoS 2 that were passed on and not yet released: their identifiers by client
	clients  map[string]string              // users of the sessions on the disk by client, while loading
}

func (h *hooks) ID() string { return "tripod" }

func (h *hooks) Provides(b byte) bool {
	return bytes.IndexByte([]byte{
		mochi.OnConnectAuthenticate, mochi.OnACLCheck, mochi.OnPacketRead, mochi.OnPacketProcessed, mochi.OnPacketEncode, mochi.OnSubscribe, mochi.OnWill,
		mochi.OnPublish, mochi.OnPublished, mochi.OnRetainMessage, mochi.OnRetainedExpired, mochi.OnSessionEstablish, mochi.OnSessionEstablished, mochi.OnSubscribed,
		mochi.OnUnsubscribed, mochi.OnQosPublish, mochi.OnQosComplete, mochi.OnQosDropped, mochi.OnDisconnect, mochi.OnClientExpired,
		mochi.StoredClients, mochi.StoredSubscriptions, mochi.StoredInflightMessages, mochi.StoredRetainedMessages,
	}, b) >= 0
}

// OnPacketRead adapts the CONNECT of the public peers to what mochi accepts, and hides the client's own packet
// identifiers from mochi. When an acknowledgement arrives, it makes room in the client's gate.
func (h *hooks) OnPacketRead(cl *mochi.Client, pk packets.Packet) (packets.Packet, error) {
	switch pk.FixedHeader.Type {
	case packets.Connect:
		if level := pk.ProtocolVersion &^ bridgeBit; level != pk.ProtocolVersion && (level == 3 || level == 4) {
			pk.ProtocolVersion = level
			pk.Properties.User = []packets.UserProperty{bridgeMark}
		}
		if len(pk.Connect.Password) == 0 { // MQTT 3.1.1 §3.1.3.5 allows the flag with an empty password
			pk.Connect.PasswordFlag = false
		}
		if pk.Connect.WillFlag && len(pk.Connect.WillPayload) == 0 { // an empty payload is also allowed, but mochi refuses it
			pk.Connect.WillPayload = []byte{0}
			pk.Connect.WillProperties.User = append(pk.Connect.WillProperties.User, emptyMark)
		}
		// Hide the receive maximum from mochi, for our gate. A will has no such property, so the field is free.
		pk.Connect.WillProperties.ReceiveMaximum, pk.Properties.ReceiveMaximum = pk.Properties.ReceiveMaximum, 0
	case packets.Publish, packets.Subscribe, packets.Unsubscribe:
		hideID(cl, &pk)
	case packets.Pubrel:
		hideID(cl, &pk)
		h.release(cl)
	case packets.Puback, packets.Pubcomp, packets.Pubrec:
		if pk.FixedHeader.Type == packets.Pubrec && pk.ReasonCode < 0x80 {
			h.taken(cl, pk.PacketID)
		}
		if g := gateOf(cl); g != nil && (pk.FixedHeader.Type != packets.Pubrec || pk.ReasonCode >= 0x80) {
			g.leave(pk.PacketID)
		}
	}
	return pk, nil
}

// OnPacketProcessed delays the next packet of a client that does not read its answers. It does not wait after a
// packet that gets no answer, because some clients read only after they have written.
func (h *hooks) OnPacketProcessed(cl *mochi.Client, pk packets.Packet, err error) {
	switch pk.FixedHeader.Type {
	case packets.Puback, packets.Pubcomp:
		return
	case packets.Publish:
		if pk.FixedHeader.Qos == 0 {
			return
		}
	}
	if c, ok := cl.Net.Conn.(*conn); ok && err == nil {
		c.wait()
	}
}

func gateOf(cl *mochi.Client) *gate {
	if c, ok := cl.Net.Conn.(*conn); ok {
		return c.gate.Load()
	}
	return nil
}

// ownProperties leaves an acknowledgement its own properties. mochi gives it also those of what it acknowledges and, because
// of them, PUBACK the reason code 0x01, which is not defined.
func ownProperties(pk packets.Packet) packets.Packet {
	pk.Properties = packets.Properties{ReasonString: pk.Properties.ReasonString}
	return pk
}

// OnPacketEncode sends MQTT 5.0 clients the packet limit, which mochi omits, and counts refused connections. It also
// delays a message until the client's window has room and, with QoS 2, until the message is on the disk. OnPacketEncode
// may block, because mochi calls it in the client's WriteLoop. The messages of mochi's resend, which have the DUP flag,
// are delayed by resume instead.
func (h *hooks) OnPacketEncode(cl *mochi.Client, pk packets.Packet) packets.Packet {
	switch pk.FixedHeader.Type {
	case packets.Publish:
		c, ok := cl.Net.Conn.(*conn)
		if !ok || pk.FixedHeader.Dup {
			break
		}
		if g := c.gate.Load(); g != nil && pk.FixedHeader.Qos > 0 {
			g.enter(pk.PacketID, true)
		}
		if pk.FixedHeader.Qos == 2 {
			h.store.wait()
		}
		c.wait()
	case packets.Pubrel:
		return ownProperties(pk)
	case packets.Puback, packets.Pubrec, packets.Pubcomp, packets.Suback, packets.Unsuback:
		return restoreID(cl, ownProperties(pk))
	case packets.Connack:
		if pk.ReasonCode != 0 {
			h.refused.Add(1)
		} else if pk.ProtocolVersion == 5 {
			pk.Properties.MaximumPacketSize = h.limit
		}
	}
	return pk
}

// foreign returns the session with the client's identifier if it belongs to another user, or nil.
func (h *hooks) foreign(cl *mochi.Client) *mochi.Client {
	session, ok := h.server.Clients.Get(cl.ID)
	if h.users == nil || !ok || bytes.Equal(session.Properties.Username, cl.Properties.Username) {
		return nil
	}
	return session
}

// OnConnectAuthenticate checks the user, the password and the certificate, and that the session with the client's
// identifier belongs to no other user, who would lose it.
func (h *hooks) OnConnectAuthenticate(cl *mochi.Client, pk packets.Packet) bool {
	certified := ""
	if c, ok := cl.Net.Conn.(*conn); ok {
		certified = c.commonName()
	}
	ok := h.users.admit(string(pk.Connect.Username), pk.Connect.Password, certified)
	if ok && len(pk.Connect.Username) == 0 {
		cl.Properties.Username = []byte(certified)
	}
	if ok && h.foreign(cl) != nil {
		h.denied.Add(1)
		h.Log.Warn("broker: the session belongs to another user", "client", cl.ID, "user", string(cl.Properties.Username), "remote", cl.Net.Remote)
		_ = h.server.SendConnack(cl, packets.ErrClientIdentifierNotValid, false, nil) // fails if the client is gone
		cl.Stop(packets.ErrClientIdentifierNotValid)                                  // or mochi would send another CONNACK
		return false
	}
	return ok
}

// OnACLCheck reports whether the client may publish to a topic, or subscribe to a filter.
func (h *hooks) OnACLCheck(cl *mochi.Client, topic string, write bool) bool {
	if h.users.allowed(string(cl.Properties.Username), cl.ID, topic, write) {
		return true
	}
	h.denied.Add(1)
	return false
}

// OnSubscribe sets No Local for clients that asked for it with the bridge bit.
func (h *hooks) OnSubscribe(cl *mochi.Client, pk packets.Packet) packets.Packet {
	if cl.Properties.ProtocolVersion >= 5 || !slices.Contains(cl.Properties.Props.User, bridgeMark) {
		return pk
	}
	for i := range pk.Filters {
		pk.Filters[i].NoLocal = !mochi.IsSharedFilter(pk.Filters[i].Filter) // not allowed for shared filters (MQTT 5.0 §3.8.3.1)
	}
	return pk
}

// OnWill suppresses all wills when the broker itself closes. It also suppresses a will to a topic that the client may
// not publish to, because mochi does not check this.
func (h *hooks) OnWill(cl *mochi.Client, will mochi.Will) (mochi.Will, error) {
	if h.closing.Load() || !h.OnACLCheck(cl, will.TopicName, true) {
		return mochi.Will{}, nil // nobody can subscribe to an empty topic
	}
	if n := len(will.User) - 1; n >= 0 && will.User[n] == emptyMark {
		will.Payload, will.User = nil, will.User[:n]
	}
	return will, nil
}

// OnPublish numbers a message, because mochi orders queued messages only by the second of their arrival. Until
// OnPublished, the acknowledgement is held back. Until then, no session can change its connection either; otherwise
// mochi could send the message to the old connection. A duplicate is only acknowledged.
func (h *hooks) OnPublish(cl *mochi.Client, pk packets.Packet) (packets.Packet, error) {
	pk.Created = h.seq.Add(1)
	c, ok := cl.Net.Conn.(*conn)
	if !ok || pk.FixedHeader.Qos == 0 {
		return pk, nil
	}
	if pk.FixedHeader.Qos == 2 && pk.FixedHeader.Dup && h.isReceived(cl.ID, c.request) {
		// An error means that the connection is closed. ErrRejectPacket makes mochi ignore the packet.
		_ = cl.WritePacket(packets.Packet{FixedHeader: packets.FixedHeader{Type: packets.Pubrec}})
		return pk, packets.ErrRejectPacket
	}
	c.hold()
	h.delivery.RLock()
	end := h.store.begin()
	c.unlockDelivery = func() {
		end()
		h.delivery.RUnlock()
	}
	return pk, nil
}

// OnPublished sends the acknowledgement, once the message is on the disk if it has to be stored.
func (h *hooks) OnPublished(cl *mochi.Client, pk packets.Packet) {
	if c, ok := cl.Net.Conn.(*conn); ok && pk.FixedHeader.Qos > 0 {
		if pk.FixedHeader.Qos == 2 {
			h.receive(cl, c.request)
		}
		c.endDelivery()
		c.release()
		h.store.throttle()
	}
}
