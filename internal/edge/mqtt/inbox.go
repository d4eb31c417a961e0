package mqtt

import "sync"

// arrival is one message on its way to the Handler, with what acknowledges it afterwards.
type arrival struct {
	Message
	seq uint64
	ack func()
}

// inbox keeps the connection's reader from waiting for the Handler. It is bounded for QoS 0, where the oldest is dropped; with
// QoS 1 and 2 the broker sends no more than its window before an acknowledgement.
type inbox struct {
	limit int
	bytes int64

	mu       sync.Mutex
	ready    *sync.Cond
	loose    []arrival // QoS 0
	kept     []arrival // QoS 1 and 2
	used     int64     // bytes of loose
	seq      uint64
	closed   bool
	dropped  uint64
	received uint64
}

func newInbox(limit int, bytes int64) *inbox {
	b := &inbox{limit: limit, bytes: bytes}
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
		b.kept = append(b.kept, a)
	} else {
		b.used += size(m)
		b.loose = append(b.loose, a)
		for len(b.loose) > 1 && (len(b.loose) > b.limit || b.used > b.bytes) {
			b.used -= size(b.loose[0].Message)
			b.loose[0] = arrival{}
			b.loose = b.loose[1:]
			b.dropped++
		}
	}
	b.ready.Signal()
}

// next waits for the oldest message; false when the inbox is closed.
func (b *inbox) next() (a arrival, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for len(b.loose)+len(b.kept) == 0 && !b.closed {
		b.ready.Wait()
	}
	if b.closed {
		return arrival{}, false
	}
	from := &b.loose
	if len(b.loose) == 0 || len(b.kept) > 0 && b.kept[0].seq < b.loose[0].seq {
		from = &b.kept
	} else {
		b.used -= size(b.loose[0].Message)
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
	return len(b.loose) + len(b.kept), b.received, b.dropped
}
