package worker

import (
	"slices"
	"time"
)

// backlog holds the messages to be sent to the daemon. channels.mu guards it.
type backlog struct {
	queue     []outgoing // messages that are not reliable
	bytes     int        // of queue
	reliable  []outgoing // reliable messages that wait
	unsettled []outgoing // reliable messages that were sent on the link, in order
	sent      int        // bytes of unsettled
	kept      int        // bytes of reliable and unsettled
	number    uint64     // of the last message
	settled   uint64     // reliable messages of the link that are no longer in unsettled
	progress  time.Time  // when the daemon last settled a message or linked the channels, or the first reliable message began to wait
	daemon    *presence
	link      *link     // nil until the daemon has linked the channels, and after the link has ended
	lastRead  time.Time // time of the last successful write to the daemon, of connect, or when messages began to wait
	ending    bool      // the pod has ended; new daemon connections are refused
	writer    notifier
	linked    notifier // woken by connect
}

// outgoing is a message from a port. The port may have been closed since.
type outgoing struct {
	port    *port
	message []byte
	number  uint64 // in the order of sending
}

func (b *backlog) full(reliable bool) bool {
	if reliable {
		return len(b.reliable)+len(b.unsettled) >= maxBacklogMessages || b.kept >= maxBacklogBytes
	}
	return len(b.queue) >= maxBacklogMessages || b.bytes >= maxBacklogBytes
}

// busy reports whether the backlog is full for messages of the given kind, and a guest should wait.
func (b *backlog) busy(reliable bool) bool {
	if !b.full(reliable) {
		return false
	}
	if reliable && (b.link == nil || b.link.settles != no) {
		return time.Since(b.progress) < patience
	}
	since := b.daemon.since.Load()
	if b.link == nil && since == 0 {
		return false
	}
	return time.Since(b.lastRead) < stallTimeout || b.link == nil && time.Since(time.Unix(0, since)) < stallTimeout
}

// keeps reports whether reliable messages are in the backlog.
func (b *backlog) keeps() bool { return len(b.reliable)+len(b.unsettled) > 0 }

// add queues a message and returns the older messages of its kind that it dropped to make room.
func (b *backlog) add(p *port, m []byte) (lost []outgoing) {
	reliable := p.reliable()
	for b.full(reliable) {
		lost = append(lost, b.take(reliable))
	}
	if len(b.queue)+len(b.reliable) == 0 {
		b.lastRead = time.Now() // an idle time does not count as the daemon's delay
	}
	if reliable && !b.keeps() {
		b.progress = time.Now()
	}
	b.number++
	b.put(outgoing{p, m, b.number})
	b.writer.wake()
	return lost
}

func (b *backlog) put(all ...outgoing) {
	for _, o := range all {
		o.port.queued++
		if o.port.reliable() {
			b.reliable, b.kept = append(b.reliable, o), b.kept+len(o.message)
		} else {
			b.queue, b.bytes = append(b.queue, o), b.bytes+len(o.message)
		}
	}
}

// take removes the oldest waiting message of a kind. When a reliable one is too many, one waits: those that were sent are
// within the window.
func (b *backlog) take(reliable bool) (o outgoing) {
	q := &b.queue
	if reliable {
		q = &b.reliable
	}
	o = (*q)[0]
	(*q)[0] = outgoing{}
	*q = (*q)[1:]
	o.port.queued--
	if reliable {
		b.kept -= len(o.message)
	} else {
		b.bytes -= len(o.message)
	}
	return o
}

// send takes the message that is sent next. It reports false if none may be sent now.
func (b *backlog) send(l *link) (outgoing, bool) {
	room := l.settles != yes || len(b.unsettled) == 0 || len(b.unsettled) < windowMessages && b.sent < windowBytes
	reliable := len(b.reliable) > 0 && room
	switch {
	case reliable && len(b.queue) > 0:
		reliable = b.reliable[0].number < b.queue[0].number
	case !reliable && len(b.queue) == 0:
		return outgoing{}, false
	}
	o := b.take(reliable)
	if reliable && l.settles == yes {
		b.unsettled = append(b.unsettled, o)
		b.sent, b.kept = b.sent+len(o.message), b.kept+len(o.message)
	}
	return o, true
}

// settle forgets the n oldest unsettled messages.
func (b *backlog) settle(n int) {
	for _, o := range b.unsettled[:n] {
		b.sent, b.kept = b.sent-len(o.message), b.kept-len(o.message)
	}
	clear(b.unsettled[:n])
	if b.unsettled = b.unsettled[n:]; len(b.unsettled) == 0 {
		b.unsettled = nil
	}
	b.settled += uint64(n)
}

// putBack returns to the front of the queues what the daemon has not settled, and the unsent frames.
func (b *backlog) putBack(l *link, frames []frame) {
	var unsent []outgoing
	lost := 0 // unsent reliable messages, which are the last of unsettled
	for _, f := range frames {
		switch {
		case f.port == nil:
		case l.settles == yes && f.port.reliable():
			lost++
		default:
			unsent = append(unsent, outgoing{f.port, f.Payload, f.number})
		}
	}
	if l.late.Load() {
		b.settle(len(b.unsettled) - lost) // the daemon has them, although the broker does not
	}
	back := append(b.unsettled, unsent...)
	queue, reliable := b.queue, b.reliable
	b.queue, b.bytes, b.reliable, b.kept = nil, 0, nil, 0
	b.unsettled, b.sent, b.settled = nil, 0, 0
	for _, o := range slices.Concat(queue, reliable) {
		o.port.queued-- // put counts it again
	}
	b.put(slices.Concat(back, queue, reliable)...)
}
