package mqtt

import "sync"

// arrival is a message for the Handler, with the function that acknowledges the message after the Handler has returned.
type arrival struct {
	Message
	seq uint64
	ack func()
}

// inbox queues messages between the connection's reader and the Handler. When it has too many messages with QoS 0, it
// drops the oldest of them. Messages with QoS 1 and 2 are bounded by the receive maximum.
type inbox struct {
	limit int
	bytes int64

	mu       sync.Mutex
	ready    *sync.Cond
	qos0     []arrival
	qos12    []arrival // QoS 1 and 2
	used     int64     // bytes of qos0
	seq      uint64
	closed   bool
	dropped  uint64
	received uint64
	report   func(l loss, messages int) // logs dropped messages; called with the lock held
}

func newInbox(limit int, bytes int64, report func(l loss, messages int)) *inbox {
	b := &inbox{limit: limit, bytes: bytes, report: report}
	b.ready = sync.NewCond(&b.mu)
	return b
}

func size(m Message) int64 { return int64(len(m.Topic) + len(m.Payload)) }

func (b *inbox) add(m Message, ack func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.seq++
	a := arrival{Message: m, seq: b.seq, ack: ack}
	if m.QoS > 0 {
		b.qos12 = append(b.qos12, a)
	} else {
		b.used += size(m)
		b.qos0 = append(b.qos0, a)
		for len(b.qos0) > 1 && (len(b.qos0) > b.limit || b.used > b.bytes) {
			b.used -= size(b.qos0[0].Message)
			b.report(loss{b.qos0[0].Topic, unread}, 1)
			b.qos0[0] = arrival{}
			b.qos0 = b.qos0[1:]
			b.dropped++
		}
	}
	b.ready.Signal()
}

// next waits for the oldest message. It reports false if the inbox is closed.
func (b *inbox) next() (a arrival, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for len(b.qos0)+len(b.qos12) == 0 && !b.closed {
		b.ready.Wait()
	}
	if b.closed {
		return arrival{}, false
	}
	from := &b.qos0
	if len(b.qos0) == 0 || len(b.qos12) > 0 && b.qos12[0].seq < b.qos0[0].seq {
		from = &b.qos12
	} else {
		b.used -= size(b.qos0[0].Message)
	}
	a = (*from)[0]
	(*from)[0] = arrival{}
	*from = (*from)[1:]
	b.received++
	return a, true
}

func (b *inbox) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	b.ready.Broadcast()
}

func (b *inbox) stats() (waiting int, received, dropped uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.qos0) + len(b.qos12), b.received, b.dropped
}
