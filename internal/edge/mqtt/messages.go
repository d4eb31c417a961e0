package mqtt

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/packet"
)

// packetOverhead is the maximum number of bytes in a PUBLISH besides its topic and payload.
const packetOverhead = 32

func (c *client) Publish(ctx context.Context, topic string, qos byte, retain bool, payload []byte) error {
	return c.PublishThen(ctx, topic, qos, retain, payload, nil)
}

// PublishThen implements Client.
func (c *client) PublishThen(ctx context.Context, topic string, qos byte, retain bool, payload []byte, settled func(delivered bool)) error {
	if err := checkTopic(topic, qos); err != nil {
		return fmt.Errorf("mqtt: publish: %w", err)
	}
	if n := int64(len(topic)+len(payload)) + packetOverhead; n > c.cfg.MaxPacket {
		return fmt.Errorf("mqtt: publish to %q: %d bytes exceed the limit of %d: %w", topic, n, c.cfg.MaxPacket, errdefs.ErrInvalidArgument)
	}
	if c.ctx.Err() != nil {
		return errClosed
	}
	if qos > 0 {
		return c.out.add(ctx, &item{topic: topic, payload: payload, qos: qos, retain: retain, settled: settled})
	}
	l := c.current()
	if l == nil {
		c.lost.Add(1)
		return fmt.Errorf("mqtt: publish to %q with QoS 0: no connection to %s: %w", topic, c.cfg.URL, errdefs.ErrUnavailable)
	}
	if l.maxPacket > 0 && int64(len(topic)+len(payload))+packetOverhead > int64(l.maxPacket) {
		return fmt.Errorf("mqtt: publish to %q: %d bytes exceed the broker's limit of %d: %w", topic, len(payload), l.maxPacket,
			errdefs.ErrInvalidArgument)
	}
	err := l.send(&packet.Publish{Retain: retain, Topic: topic, Payload: payload})
	if err != nil {
		c.lost.Add(1)
		return fmt.Errorf("mqtt: publish to %q with QoS 0: %v: %w", topic, err, errdefs.ErrUnavailable)
	}
	c.sent.Add(1)
	if settled != nil {
		settled(true)
	}
	return nil
}

// handle processes a packet from the broker. An error ends the connection.
func (c *client) handle(l *link, p packet.Packet) error {
	switch p := p.(type) {
	case *packet.Publish:
		return c.received(l, p)
	case *packet.Ack:
		switch {
		case p.Type == packet.PUBREL:
			return c.completed(l, p.ID)
		case p.Type != packet.PUBREC || p.Code.Failed():
			c.acknowledged(p)
			return nil
		}
		code := packet.Success
		if !c.out.release(p.ID) {
			code = packet.IDNotFound
		}
		return l.send(&packet.Ack{Type: packet.PUBREL, ID: p.ID, Code: code})
	case *packet.Suback:
		c.out.answer(p)
	case *packet.Ping:
	case *packet.End:
		if p.Code == packet.SessionTakenOver {
			return fmt.Errorf("%w %s", errTakenOver, p.Properties.Text(packet.ReasonString))
		}
		return fmt.Errorf("mqtt: the broker disconnected: %v %s: %w", p.Code, p.Properties.Text(packet.ReasonString), errdefs.ErrUnavailable)
	default:
		return fmt.Errorf("mqtt: the broker sent %T: %w", p,
			&packet.Error{Code: packet.ProtocolError, Text: "a packet that no broker sends here"})
	}
	return nil
}

// acknowledged processes the broker's last answer to a published message.
func (c *client) acknowledged(p *packet.Ack) {
	if it := c.out.done(p.ID, p.Code); it != nil && p.Code.Failed() && !it.released {
		c.cfg.Log.Warn("mqtt: the broker refused a message", "topic", it.topic, "qos", it.qos, "reason", p.Code.String(), "text",
			p.Properties.Text(packet.ReasonString))
	}
}

// received puts a message into the inbox. The message is acknowledged after the Handler has returned.
func (c *client) received(l *link, p *packet.Publish) error {
	m := Message{Topic: p.Topic, Payload: p.Payload, QoS: p.QoS, Retain: p.Retain}
	switch m.QoS {
	case 0:
		c.in.add(m, nil)
	case 1:
		// Acknowledge the message only on this connection, because on a later connection the identifier may belong to
		// another message.
		c.in.add(m, func() { _ = l.send(&packet.Ack{Type: packet.PUBACK, ID: p.ID}) })
	case 2:
		return c.receivedQoS2(l, m, p.ID, p.Dup)
	}
	return nil
}

// receivedQoS2 puts a message with QoS 2 into the inbox once, however often the broker sends it (MQTT 5.0 §4.3.3). A
// known identifier without the DUP flag belongs to a new message: the broker was killed and has forgotten the first one.
func (c *client) receivedQoS2(l *link, m Message, id uint16, dup bool) error {
	c.mu.Lock()
	handled, known := c.qos2[id]
	epoch := c.epoch
	if !dup {
		handled, known = false, false
	}
	if !known {
		c.qos2[id] = false
	}
	c.mu.Unlock()
	switch {
	case handled:
		return l.send(&packet.Ack{Type: packet.PUBREC, ID: id})
	case !known:
		c.in.add(m, func() { c.handledQoS2(id, epoch) })
	}
	return nil
}

// handledQoS2 acknowledges a message with QoS 2 on the current connection. That may be a later connection of the same
// session.
func (c *client) handledQoS2(id uint16, epoch uint64) {
	c.mu.Lock()
	l := c.link
	same := epoch == c.epoch
	if same {
		c.qos2[id] = true
	}
	c.mu.Unlock()
	if same && l != nil {
		_ = l.send(&packet.Ack{Type: packet.PUBREC, ID: id}) // if the link fails, the broker sends the message again
	}
}

// completed ends the delivery of a message with QoS 2 from the broker.
func (c *client) completed(l *link, id uint16) error {
	c.mu.Lock()
	_, known := c.qos2[id]
	delete(c.qos2, id)
	c.mu.Unlock()
	code := packet.Success
	if !known {
		code = packet.IDNotFound
	}
	return l.send(&packet.Ack{Type: packet.PUBCOMP, ID: id, Code: code})
}
