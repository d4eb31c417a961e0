package mqtt

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/mochi-mqtt/server/v2/packets"
)

// packetOverhead is more than a PUBLISH needs besides topic and payload, in bytes.
const packetOverhead = 32

// Publish sends one message; see Client.
func (c *client) Publish(ctx context.Context, topic string, qos byte, retain bool, payload []byte) error {
	if err := checkTopic(topic, qos); err != nil {
		return fmt.Errorf("mqtt: publish: %w", err)
	}
	if n := int64(len(topic)+len(payload)) + packetOverhead; n > c.cfg.MaxPacket {
		return fmt.Errorf("mqtt: publish to %q: %d bytes are over the limit of %d: %w", topic, n, c.cfg.MaxPacket, errdefs.ErrInvalidArgument)
	}
	if c.ctx.Err() != nil {
		return errClosed
	}
	if qos > 0 {
		return c.out.add(ctx, &item{topic: topic, payload: payload, qos: qos, retain: retain})
	}
	l := c.current()
	if l == nil {
		c.lost.Add(1)
		return fmt.Errorf("mqtt: publish to %q with QoS 0: no connection to %s: %w", topic, c.cfg.URL, errdefs.ErrUnavailable)
	}
	if l.maxPacket > 0 && int64(len(topic)+len(payload))+packetOverhead > int64(l.maxPacket) {
		return fmt.Errorf("mqtt: publish to %q: %d bytes are over the broker's limit of %d: %w", topic, len(payload), l.maxPacket, errdefs.ErrInvalidArgument)
	}
	err := l.send(packets.Packet{
		FixedHeader: packets.FixedHeader{Type: packets.Publish, Retain: retain},
		TopicName:   topic, Payload: payload,
	})
	if err != nil {
		c.lost.Add(1)
		return fmt.Errorf("mqtt: publish to %q with QoS 0: %v: %w", topic, err, errdefs.ErrUnavailable)
	}
	c.sent.Add(1)
	return nil
}

// handle works one packet of the broker. An error ends the connection.
func (c *client) handle(l *link, pk packets.Packet) error {
	switch pk.FixedHeader.Type {
	case packets.Publish:
		return c.received(l, pk)
	case packets.Puback, packets.Pubcomp:
		c.acknowledged(pk)
	case packets.Pubrec:
		if pk.ReasonCode >= 0x80 {
			c.acknowledged(pk)
			return nil
		}
		reason := byte(0)
		if !c.out.release(pk.PacketID) {
			reason = packets.ErrPacketIdentifierNotFound.Code
		}
		return l.send(ack(packets.Pubrel, pk.PacketID, reason))
	case packets.Pubrel:
		return c.completed(l, pk.PacketID)
	case packets.Suback, packets.Unsuback:
		c.out.answer(pk)
	case packets.Pingresp:
	case packets.Disconnect:
		return fmt.Errorf("mqtt: the broker disconnects: reason 0x%02x %s: %w", pk.ReasonCode, pk.Properties.ReasonString, errdefs.ErrUnavailable)
	default:
		return fmt.Errorf("mqtt: the broker sends %s: %w", packets.PacketNames[pk.FixedHeader.Type], packets.ErrProtocolViolation)
	}
	return nil
}

// acknowledged ends a message of ours.
func (c *client) acknowledged(pk packets.Packet) {
	if it := c.out.done(pk.PacketID, pk.ReasonCode); it != nil && pk.ReasonCode >= 0x80 && !it.released {
		c.cfg.Log.Warn("mqtt: the broker refuses a message", "topic", it.topic, "qos", it.qos, "reason", fmt.Sprintf("0x%02x", pk.ReasonCode), "text", pk.Properties.ReasonString)
	}
}

// received puts a message into the inbox, with what acknowledges it when the Handler has returned.
func (c *client) received(l *link, pk packets.Packet) error {
	m := Message{Topic: pk.TopicName, Payload: pk.Payload, QoS: pk.FixedHeader.Qos, Retain: pk.FixedHeader.Retain}
	switch m.QoS {
	case 0:
		c.in.add(m, nil)
	case 1:
		// Only on this connection: on a later one the identifier may stand for another message.
		id := pk.PacketID
		c.in.add(m, func() { _ = l.send(ack(packets.Puback, id, 0)) })
	case 2:
		return c.receivedExact(l, m, pk.PacketID)
	}
	return nil
}

// receivedExact takes a message of QoS 2 once, however often the broker sends it (MQTT 5.0 §4.3.3).
func (c *client) receivedExact(l *link, m Message, id uint16) error {
	c.mu.Lock()
	handled, known := c.exact[id]
	epoch := c.epoch
	if !known {
		c.exact[id] = false
	}
	c.mu.Unlock()
	switch {
	case handled:
		return l.send(ack(packets.Pubrec, id, 0))
	case !known:
		c.in.add(m, func() { c.handledExact(id, epoch) })
	}
	return nil
}

// handledExact acknowledges a message of QoS 2 on whichever connection there is now: the session is the same.
func (c *client) handledExact(id uint16, epoch uint64) {
	c.mu.Lock()
	l := c.link
	same := epoch == c.epoch
	if same {
		c.exact[id] = true
	}
	c.mu.Unlock()
	if same && l != nil {
		_ = l.send(ack(packets.Pubrec, id, 0)) // a link that fails makes the broker send the message again
	}
}

// completed ends a message of QoS 2 of the broker's.
func (c *client) completed(l *link, id uint16) error {
	c.mu.Lock()
	_, known := c.exact[id]
	delete(c.exact, id)
	c.mu.Unlock()
	reason := byte(0)
	if !known {
		reason = packets.ErrPacketIdentifierNotFound.Code
	}
	return l.send(ack(packets.Pubcomp, id, reason))
}
