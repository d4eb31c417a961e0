package mqtt

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"time"

	"github.com/containerd/errdefs"
	"github.com/mochi-mqtt/server/v2/packets"
)

// bridgeBit, set in the protocol level of an MQTT 3.1.1 CONNECT, marks the client as a bridge. mosquitto and our own
// broker do not send a bridge its own messages.
const bridgeBit = 0x80

// readPacket reads and decodes one packet, which may have at most the given size.
func readPacket(r *bufio.Reader, version byte, limit int64) (packets.Packet, error) {
	pk := packets.Packet{ProtocolVersion: version}
	first, err := r.ReadByte()
	if err != nil {
		return pk, err
	}
	if err := pk.FixedHeader.Decode(first); err != nil {
		return pk, fmt.Errorf("mqtt: packet that begins with 0x%02x: %w", first, err)
	}
	length, _, err := packets.DecodeLength(r)
	if err != nil {
		return pk, fmt.Errorf("mqtt: length of a packet: %w", err)
	}
	if int64(length) > limit {
		return pk, fmt.Errorf("mqtt: the broker sent a packet of %d bytes, more than the limit of %d: %w", length, limit, errdefs.ErrResourceExhausted)
	}
	pk.FixedHeader.Remaining = length
	body := make([]byte, length)
	if _, err := io.ReadFull(r, body); err != nil {
		return pk, fmt.Errorf("mqtt: packet of %d bytes: %w", length, err)
	}
	if err := decode(&pk, body); err != nil {
		return pk, fmt.Errorf("mqtt: %s from the broker: %w", packets.PacketNames[pk.FixedHeader.Type], err)
	}
	return pk, nil
}

// decode decodes the packets that a broker can send. It recovers from panics, because the library panics on some
// truncated packets.
func decode(pk *packets.Packet, body []byte) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%v: %w", p, packets.ErrMalformedPacket)
		}
	}()
	switch pk.FixedHeader.Type {
	case packets.Connack:
		return pk.ConnackDecode(body)
	case packets.Publish:
		return pk.PublishDecode(body)
	case packets.Puback, packets.Pubrec, packets.Pubrel, packets.Pubcomp:
		return pk.PubackDecode(body)
	case packets.Suback:
		return pk.SubackDecode(body)
	case packets.Unsuback:
		return pk.UnsubackDecode(body)
	case packets.Disconnect:
		return pk.DisconnectDecode(body)
	case packets.Pingresp:
		return nil
	}
	return packets.ErrProtocolViolation
}

// encode appends a packet that a client can send.
func encode(buf *bytes.Buffer, pk packets.Packet) error {
	switch pk.FixedHeader.Type {
	case packets.Connect:
		return pk.ConnectEncode(buf)
	case packets.Publish:
		return pk.PublishEncode(buf)
	case packets.Puback, packets.Pubrec, packets.Pubrel, packets.Pubcomp:
		return pk.PubackEncode(buf)
	case packets.Subscribe:
		return pk.SubscribeEncode(buf)
	case packets.Unsubscribe:
		return pk.UnsubscribeEncode(buf)
	case packets.Pingreq:
		return pk.PingreqEncode(buf)
	case packets.Disconnect:
		return pk.DisconnectEncode(buf)
	}
	return packets.ErrProtocolViolation
}

// connectPacket returns the CONNECT (MQTT 3.1.1 §3.1, MQTT 5.0 §3.1).
func connectPacket(c Config) packets.Packet {
	pk := packets.Packet{
		FixedHeader:     packets.FixedHeader{Type: packets.Connect},
		ProtocolVersion: byte(c.Protocol),
		Connect: packets.ConnectParams{
			ProtocolName:     []byte("MQTT"),
			ClientIdentifier: c.ClientID,
			Clean:            c.SessionExpiry == 0,
			Keepalive:        uint16(min(max(c.KeepAlive.Seconds(), 1), 65_535)),
			UsernameFlag:     c.Username != "",
			Username:         []byte(c.Username),
			PasswordFlag:     c.Password != "",
			Password:         []byte(c.Password),
		},
	}
	if w := c.Will; w != nil {
		pk.Connect.WillFlag, pk.Connect.WillTopic, pk.Connect.WillPayload = true, w.Topic, w.Payload
		pk.Connect.WillQos, pk.Connect.WillRetain = w.QoS, w.Retain
		pk.Connect.WillProperties.WillDelayInterval = seconds(w.Delay)
	}
	switch {
	case c.Protocol == 5:
		pk.Properties.SessionExpiryInterval, pk.Properties.SessionExpiryIntervalFlag = seconds(c.SessionExpiry), c.SessionExpiry > 0
		pk.Properties.ReceiveMaximum = receiveMaximum
		pk.Properties.MaximumPacketSize = uint32(c.MaxPacket)
	case c.NoLocal:
		pk.ProtocolVersion |= bridgeBit
	}
	return pk
}

// ack returns an acknowledgement. Its reason is sent only in MQTT 5.0.
func ack(kind byte, id uint16, reason byte) packets.Packet {
	pk := packets.Packet{FixedHeader: packets.FixedHeader{Type: kind}, PacketID: id, ReasonCode: reason}
	if kind == packets.Pubrel {
		pk.FixedHeader.Qos = 1 // the fixed bits of MQTT 5.0 §3.6.1
	}
	return pk
}

// seconds returns d as MQTT encodes it: in whole seconds, rounded up, in 32 bits.
func seconds(d time.Duration) uint32 {
	return uint32(min(int64((d+time.Second-1)/time.Second), 0xffff_ffff))
}
