package broker

import (
	"bytes"
	"slices"
	"sync"
	"sync/atomic"

	mochi "github.com/mochi-mqtt/server/v2"
	"github.com/mochi-mqtt/server/v2/packets"
)

// bridgeBit in the protocol level of MQTT 3.1 and 3.1.1 is mosquitto's way to say: send me nothing of my own.
const bridgeBit = 0x80

// bridgeMark is how a client that has set it is known later: MQTT 3.1.1 has no user properties, so the place is free, and it is
// stored with the session.
var bridgeMark = packets.UserProperty{Key: "tripod.bridge"}

// emptyMark is how a will without a payload is known until it is published.
var emptyMark = packets.UserProperty{Key: "tripod.empty"}

// hooks are what mochi asks and tells. One type, so the order within an event is plain.
type hooks struct {
	mochi.HookBase
	server *mochi.Server
	users  *users
	store  *store
	limit  uint32 // bytes of a packet
	queued int    // messages for one client
	bytes  int64  // of what waits for one client with a session

	closing                  atomic.Bool
	refused, denied, dropped atomic.Uint64

	seq     atomic.Int64 // of messages; stands in Packet.Created
	passing sync.RWMutex // read: a message goes to its receivers; write: a session goes to another connection
	mu      sync.Mutex
	stored  map[string]*waiting // by client
	clients map[string]struct{} // sessions on the disk, while loading
}

// ID implements mochi.Hook.
func (h *hooks) ID() string { return "tripod" }

// Provides implements mochi.Hook.
func (h *hooks) Provides(b byte) bool {
	return bytes.IndexByte([]byte{
		mochi.OnConnectAuthenticate, mochi.OnACLCheck, mochi.OnPacketRead, mochi.OnPacketProcessed, mochi.OnPacketEncode, mochi.OnSubscribe, mochi.OnWill,
		mochi.OnPublish, mochi.OnPublished, mochi.OnRetainMessage, mochi.OnRetainedExpired, mochi.OnSessionEstablish, mochi.OnSessionEstablished, mochi.OnSubscribed,
		mochi.OnUnsubscribed, mochi.OnQosPublish, mochi.OnQosComplete, mochi.OnQosDropped, mochi.OnDisconnect, mochi.OnClientExpired,
		mochi.StoredClients, mochi.StoredSubscriptions, mochi.StoredInflightMessages, mochi.StoredRetainedMessages,
	}, b) >= 0
}

// OnPacketRead makes a CONNECT of the public peers one that mochi takes, and hears of the room that an acknowledgement makes.
func (h *hooks) OnPacketRead(cl *mochi.Client, pk packets.Packet) (packets.Packet, error) {
	switch pk.FixedHeader.Type {
	case packets.Connect:
		if level := pk.ProtocolVersion &^ bridgeBit; level != pk.ProtocolVersion && (level == 3 || level == 4) {
			pk.ProtocolVersion = level
			pk.Properties.User = []packets.UserProperty{bridgeMark}
		}
		if len(pk.Connect.Password) == 0 { // set, and empty, is allowed (MQTT 3.1.1 §3.1.3.5)
			pk.Connect.PasswordFlag = false
		}
		if pk.Connect.WillFlag && len(pk.Connect.WillPayload) == 0 { // allowed too, and refused by mochi
			pk.Connect.WillPayload = []byte{0}
			pk.Connect.WillProperties.User = append(pk.Connect.WillProperties.User, emptyMark)
		}
		// For our gate, not for mochi; a will has no such property.
		pk.Connect.WillProperties.ReceiveMaximum, pk.Properties.ReceiveMaximum = pk.Properties.ReceiveMaximum, 0
	case packets.Puback, packets.Pubcomp, packets.Pubrec:
		if g := gateOf(cl); g != nil && (pk.FixedHeader.Type != packets.Pubrec || pk.ReasonCode >= 0x80) {
			g.leave(pk.PacketID)
		}
	}
	return pk, nil
}

// OnPacketProcessed makes a client that does not read its answers wait with its next packet. Those that have no answer pass:
// some clients read only when they have written.
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

// OnPacketEncode tells a client of MQTT 5.0 the limit that mochi keeps to itself, counts who was refused, and lets a message
// wait for room: that is the client's own WriteLoop, behind which the others wait. mochi's resend, with the DUP flag, is gated
// by resume.
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
		c.wait()
	case packets.Connack:
		if pk.ReasonCode != 0 {
			h.refused.Add(1)
		} else if pk.ProtocolVersion == 5 {
			pk.Properties.MaximumPacketSize = h.limit
		}
	}
	return pk
}

// OnConnectAuthenticate decides who may come in.
func (h *hooks) OnConnectAuthenticate(cl *mochi.Client, pk packets.Packet) bool {
	proved := ""
	if c, ok := cl.Net.Conn.(*conn); ok {
		proved = c.commonName()
	}
	ok := h.users.admit(string(pk.Connect.Username), pk.Connect.Password, proved)
	if ok && len(pk.Connect.Username) == 0 {
		cl.Properties.Username = []byte(proved)
	}
	return ok
}

// OnACLCheck decides about a topic, or about a filter that is subscribed to.
func (h *hooks) OnACLCheck(cl *mochi.Client, topic string, write bool) bool {
	if h.users.may(string(cl.Properties.Username), cl.ID, topic, write) {
		return true
	}
	h.denied.Add(1)
	return false
}

// OnSubscribe gives No Local to those who could only ask for it by the bridge bit.
func (h *hooks) OnSubscribe(cl *mochi.Client, pk packets.Packet) packets.Packet {
	if cl.Properties.ProtocolVersion >= 5 || !slices.Contains(cl.Properties.Props.User, bridgeMark) {
		return pk
	}
	for i := range pk.Filters {
		pk.Filters[i].NoLocal = !mochi.IsSharedFilter(pk.Filters[i].Filter) // these have none (MQTT 5.0 §3.8.3.1)
	}
	return pk
}

// OnWill keeps wills from being published when the broker itself goes, or to a topic that is not open to the client; mochi asks
// nobody about that.
func (h *hooks) OnWill(cl *mochi.Client, will mochi.Will) (mochi.Will, error) {
	if h.closing.Load() || !h.OnACLCheck(cl, will.TopicName, true) {
		return mochi.Will{}, nil // no topic: nobody has subscribed to that
	}
	if n := len(will.User) - 1; n >= 0 && will.User[n] == emptyMark {
		will.Payload, will.User = nil, will.User[:n]
	}
	return will, nil
}

// OnPublish numbers a message, for the order of those that wait for a client: mochi knows seconds only. Its acknowledgement is
// held back until OnPublished, and no session moves until then: mochi would give the message to a connection that has gone.
func (h *hooks) OnPublish(cl *mochi.Client, pk packets.Packet) (packets.Packet, error) {
	pk.Created = h.seq.Add(1)
	if c, ok := cl.Net.Conn.(*conn); ok && pk.FixedHeader.Qos > 0 {
		c.hold()
		h.passing.RLock()
		c.unlock = h.passing.RUnlock
	}
	return pk, nil
}

// OnPublished lets the acknowledgement go when what must be on the disk is there.
func (h *hooks) OnPublished(cl *mochi.Client, pk packets.Packet) {
	if c, ok := cl.Net.Conn.(*conn); ok && pk.FixedHeader.Qos > 0 {
		c.unlocked()
		h.store.wait()
		c.release()
	}
}
