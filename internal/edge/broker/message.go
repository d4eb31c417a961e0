package broker

import (
	"encoding/binary"
	"time"

	"github.com/tripod-run/tripod/internal/edge/packet"
)

// message is an application message. All sessions share it; only the last two fields change.
type message struct {
	topic   string
	payload []byte
	props   []byte // the properties that receivers get unchanged, encoded
	qos     byte
	retain  bool      // as it was published
	expires time.Time // zero: never
	from    string    // client identifier of its sender, for No Local

	// id names the message in the store. refs is the number of its records there; records.mu guards both.
	id   uint64
	refs int
}

// newMessage returns the message of a PUBLISH, with its topic.
func newMessage(p *packet.Publish, topic, from string, now time.Time) *message {
	return &message{
		topic: topic, payload: p.Payload, props: p.Properties.AppendForwarded(nil), qos: p.QoS, retain: p.Retain,
		expires: expiry(p.Properties, now), from: from,
	}
}

// expiry returns when a message with the given properties expires, or the zero time.
func expiry(p *packet.Properties, now time.Time) time.Time {
	if !p.Has(packet.MessageExpiry) {
		return time.Time{}
	}
	return now.Add(time.Duration(p.Number(packet.MessageExpiry)) * time.Second)
}

func (m *message) expired(now time.Time) bool { return !m.expires.IsZero() && !now.Before(m.expires) }

// size is what the message counts for in the limits of a queue, in bytes.
func (m *message) size() int64 { return int64(len(m.topic) + len(m.payload) + len(m.props)) }

// held is what the message counts for in the limit of retained messages, in bytes: also unusually many levels, because each
// can be a node of the tree.
func (m *message) held() int64 { return m.size() + 256*int64(max(levels(m.topic)-10, 0)) }

// delivery is a message on its way to a session.
type delivery struct {
	*message
	qos    byte // of the delivery; at most that of the message
	retain bool
	free   bool     // it does not count for the limits of the queue
	ids    []uint32 // Subscription Identifiers
}

// appendPublish appends the PUBLISH of a delivery. topic and alias are what the packet has for its topic.
func (d *delivery) appendPublish(to []byte, level byte, id uint16, dup bool, topic string, alias uint16, now time.Time) []byte {
	n := 2 + len(topic) + len(d.payload)
	if d.qos > 0 {
		n += 2
	}
	var own [64]byte
	props := own[:0]
	if level >= 5 {
		if !d.expires.IsZero() {
			left := max((d.expires.Sub(now)+time.Second-1)/time.Second, 1)
			props = binary.BigEndian.AppendUint32(append(props, byte(packet.MessageExpiry)), uint32(min(left, 1<<32-1)))
		}
		if alias > 0 {
			props = binary.BigEndian.AppendUint16(append(props, byte(packet.TopicAlias)), alias)
		}
		for _, id := range d.ids {
			props = packet.AppendLength(append(props, byte(packet.SubscriptionID)), int(id))
		}
		n += len(props) + len(d.props)
		n += packet.LengthSize(len(props) + len(d.props))
	}
	to = packet.AppendLength(append(to, packet.PublishFlags(d.qos, dup, d.retain)), n)
	to = packet.AppendText(to, topic)
	if d.qos > 0 {
		to = binary.BigEndian.AppendUint16(to, id)
	}
	if level >= 5 {
		to = packet.AppendLength(to, len(props)+len(d.props))
		to = append(append(to, props...), d.props...)
	}
	return append(to, d.payload...)
}

// fifo is a queue. Most of the queues of a broker have never had an item, so such a one is only a pointer.
type fifo[T any] struct{ *queue[T] }

type queue[T any] struct {
	items []T
	head  int
}

func newFifo[T any](items []T) fifo[T] {
	if len(items) == 0 {
		return fifo[T]{}
	}
	return fifo[T]{&queue[T]{items: items}}
}

func (f *fifo[T]) push(item T) {
	if f.queue == nil {
		f.queue = &queue[T]{}
	}
	f.items = append(f.items, item)
}

func (q *queue[T]) len() int {
	if q == nil {
		return 0
	}
	return len(q.items) - q.head
}

func (q *queue[T]) first() *T { return &q.items[q.head] }

func (q *queue[T]) pop() (item T) {
	item, q.items[q.head] = q.items[q.head], item
	q.head++
	switch {
	case q.head == len(q.items):
		if q.items, q.head = q.items[:0], 0; cap(q.items) > 256 {
			q.items = nil
		}
	case q.head > 64 && q.head > len(q.items)/2:
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	return item
}

// all returns the items in their order.
func (q *queue[T]) all() []T {
	if q == nil {
		return nil
	}
	return q.items[q.head:]
}
