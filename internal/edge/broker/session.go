package broker

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tripod-run/tripod/internal/edge/packet"
)

// maxInFlight bounds the messages in flight to a client, which all need a packet identifier.
const maxInFlight = 60_000

// session is the state that the broker keeps for a client (MQTT 5.0 §4.1), with or without a connection. Messages for the
// client move through it in this order:
//
//	enqueue ─▶ waiting ──window has room──▶ flight ──PUBACK, PUBCOMP──▶ gone
//	              │                            ├─ the connection is lost: again ─▶ flight
//	              └─ waiting0 (QoS 0) ─▶ gone  └─ PUBREC: released, then PUBREL
type session struct {
	server *server
	id     string
	user   string

	// subs holds the subscriptions by filter, and levels the number of their levels; guarded by server.mu.
	subs   map[string]*subscription
	levels int32
	// timer ends the session of an absent client; guarded by server.mu.
	timer *time.Timer

	mu     sync.Mutex
	conn   *conn         // nil while the client is absent
	expiry time.Duration // how long the session outlives its connection; 0: not at all
	ended  time.Time     // when the last connection ended

	order    uint64 // of the last entry
	waiting0 fifo[delivery]
	waiting  fifo[*entry]
	again    fifo[*entry] // of flight: to be sent once more on this connection
	flight   map[uint16]*entry
	window   int32 // entries of flight that may still be sent on this connection
	lastID   uint16
	// wasOnline is set while the session is loaded, if its client was connected when the broker was killed.
	wasOnline bool
	bytes     int64               // of waiting0, waiting and flight, without retained messages at SUBSCRIBE
	counted   int                 // entries of waiting and flight that count for the limit
	counted0  int                 // deliveries of waiting0 that do
	received  map[uint16]struct{} // messages with QoS 2 from the client that it has not released
}

// entry is a delivery with QoS 1 or 2.
type entry struct {
	delivery
	order    uint64
	id       uint16 // 0 until it is sent
	dup      bool   // it was sent before
	released bool   // the client has the message: PUBREL comes next
	onWire   bool   // it takes a place in the window of this connection
	kept     bool   // it is in the store
	batch    uint64 // the store's batch that must be on the disk before it is sent
	share    *group
}

func inOrder(a, b *entry) int { return cmp.Compare(a.order, b.order) }

func (b *server) newSession(id, user string) *session {
	return &session{server: b, id: id, user: user}
}

// persistent reports whether the session outlives its connection, and so belongs into the store.
func (s *session) persistent() bool { return s.expiry > 0 }

// outlives is persistent for callers that do not hold the session's lock.
func (s *session) outlives() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.persistent()
}

// online reports whether the client is connected.
func (s *session) online() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conn != nil
}

// enqueue adds a delivery. It returns false if the session does not take it: the queue is full, or QoS is 0 and the client
// is absent. The deliveries of retained messages at SUBSCRIBE are free, because the messages are in memory anyway: only
// sendRetained limits them. Its caller holds server.mu and is in a group of the store's changes.
func (s *session) enqueue(d delivery, share *group, free bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	size := d.size()
	d.free = free
	if d.qos == 0 {
		if s.conn == nil {
			return false
		}
		if !free && (s.counted0 >= s.server.cfg.MaxQueued || s.bytes+size > s.server.cfg.MaxQueuedBytes) {
			return false
		}
		if !free {
			s.counted0++
			s.bytes += size
		}
		s.waiting0.push(d)
		s.conn.kick()
		return true
	}
	if !free && (s.counted >= s.server.cfg.MaxQueued || s.bytes+size > s.server.cfg.MaxQueuedBytes) {
		return false
	}
	s.order++
	e := &entry{delivery: d, order: s.order, share: share}
	if !free {
		s.counted++
		s.bytes += size
	}
	if s.conn != nil && s.waiting.len() == 0 && s.mayIdentify() {
		s.identify(e) // it is sent at once, and need not be stored again with its identifier
	}
	if s.persistent() {
		s.keep(e)
	}
	s.waiting.push(e)
	if s.conn != nil {
		s.conn.kick()
	}
	return true
}

// keep stores an entry, or its change. A message with QoS 2 is sent only once it is on the disk with its identifier: the
// client takes a later message with that identifier for the same one, until it gets PUBREL.
func (s *session) keep(e *entry) {
	s.server.records.putEntry(s.id, e)
	if e.qos == 2 {
		e.batch = s.server.store.needed()
	}
}

// mayIdentify reports whether another message may be in flight. Messages of which only PUBREL is left take no place in
// the window, but an identifier.
func (s *session) mayIdentify() bool { return s.window > 0 && len(s.flight) < maxInFlight }

// identify gives an entry a packet identifier that is free.
func (s *session) identify(e *entry) {
	for {
		s.lastID++
		if _, used := s.flight[s.lastID]; s.lastID != 0 && !used {
			break
		}
	}
	e.id = s.lastID
}

// drop forgets an entry. The message's receiver has it, or must not get it.
func (s *session) drop(e *entry) {
	if e.onWire {
		e.onWire = false
		s.window++
	}
	if e.id != 0 && s.flight[e.id] == e {
		delete(s.flight, e.id)
	}
	if !e.free {
		s.counted--
		s.bytes -= e.size()
	}
	if e.kept {
		s.server.records.deleteEntry(s.id, e)
	}
}

// attach gives the session a new connection, which is to get the messages in flight once more. It returns the previous
// connection, if there is one.
func (s *session) attach(c *conn) (previous *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	previous = s.conn
	s.lost()
	s.conn, s.window, s.expiry = c, int32(c.window), c.expires
	again := slices.SortedFunc(maps.Values(s.flight), inOrder)
	// PUBREL first: it must not wait for room in the window, as a PUBLISH may have to (MQTT 5.0 §4.9).
	slices.SortStableFunc(again, func(a, b *entry) int {
		switch {
		case a.released == b.released:
			return 0
		case a.released:
			return -1
		}
		return 1
	})
	s.again = newFifo(again)
	return previous
}

// detach ends the given connection's part in the session. It returns false if another connection has taken the session over.
func (s *session) detach(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn != c {
		return false
	}
	s.lost()
	s.ended = time.Now()
	return true
}

// clear forgets everything, because the session has ended. It returns the connection, and what others may get instead.
func (s *session) clear() (previous *conn, orphans []*entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	forget := func(e *entry, mayHave bool) {
		if e.share != nil && (!mayHave || e.qos == 1) {
			orphans = append(orphans, e)
		}
		s.drop(e)
	}
	for _, e := range s.flight {
		forget(e, true)
	}
	now := time.Now()
	for s.waiting.len() > 0 {
		e := s.waiting.pop()
		if e.share == nil && !e.expired(now) {
			s.server.lose(loss{s.id, e.topic, lossEnd})
		}
		forget(e, false)
	}
	for id := range s.received {
		s.server.records.deleteReceived(s.id, id)
	}
	s.received = nil
	previous, s.conn = s.conn, nil
	slices.SortFunc(orphans, inOrder)
	return previous, orphans
}

// lost forgets what belonged to the connection that has ended.
func (s *session) lost() {
	s.conn = nil
	for s.waiting0.len() > 0 {
		s.pop0()
	}
	s.again = fifo[*entry]{}
	if s.waiting.len() > 0 {
		if e := *s.waiting.first(); e.id != 0 { // it was not sent
			if e.id = 0; e.kept {
				s.keep(e)
			}
		}
	}
	for _, e := range s.flight {
		e.onWire = false
		if !e.dup {
			e.dup = true
			if e.kept { // the next process has to know it, too
				s.server.records.putEntry(s.id, e)
			}
		}
	}
}

// collect appends packets for the connection, until there are about limit bytes or nothing is left that may be sent now.
// It returns the store's batch that the next message waits for, or 0.
func (s *session) collect(c *conn, to []byte, limit int) (out []byte, batch uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn != c {
		return to, 0
	}
	now := time.Now()
	for len(to) < limit {
		switch {
		case s.again.len() > 0 && s.window > 0:
			e := s.again.pop()
			if s.flight[e.id] != e {
				continue // acknowledged meanwhile, as a client may do that kept its side of the session
			}
			to = s.sendAgain(c, to, e, now)
		case s.again.len() == 0 && s.waiting.len() > 0 && s.mayIdentify():
			e := *s.waiting.first()
			if e.id == 0 && !e.expired(now) {
				if s.identify(e); e.kept && e.qos == 2 {
					s.keep(e)
				}
			}
			if !s.server.store.isWritten(e.batch) {
				if s.waiting0.len() > 0 {
					to = s.send0(c, to, now)
					continue
				}
				return to, e.batch
			}
			s.waiting.pop()
			to = s.send(c, to, e, now)
		case s.waiting0.len() > 0:
			to = s.send0(c, to, now)
		default:
			return to, 0
		}
	}
	return to, 0
}

func (s *session) pop0() delivery {
	d := s.waiting0.pop()
	if !d.free {
		s.counted0--
		s.bytes -= d.size()
	}
	return d
}

func (s *session) send0(c *conn, to []byte, now time.Time) []byte {
	d := s.pop0()
	if d.expired(now) {
		return to
	}
	if out, ok := c.appendMessage(to, &d, 0, false, now); ok {
		s.server.sent.Add(1)
		return out
	}
	s.server.lose(loss{s.id, d.topic, lossPacket})
	return to
}

func (s *session) send(c *conn, to []byte, e *entry, now time.Time) []byte {
	if !e.expired(now) {
		if out, ok := c.appendMessage(to, &e.delivery, e.id, false, now); ok {
			s.fly(e)
			e.onWire = true
			s.window--
			s.server.sent.Add(1)
			return out
		}
		s.server.lose(loss{s.id, e.topic, lossPacket})
	}
	s.drop(e)
	return to
}

// fly puts an entry into flight. Most sessions never have one.
func (s *session) fly(e *entry) {
	if s.flight == nil {
		s.flight = map[uint16]*entry{}
	}
	s.flight[e.id] = e
}

// recoverFlight takes the messages for sent that came before one that was, while loading: with QoS 1, a message is not
// stored again with its identifier when it is sent.
func (s *session) recoverFlight() {
	var last uint64
	for _, e := range s.flight {
		last = max(last, e.order)
	}
	for s.waiting.len() > 0 && (*s.waiting.first()).order < last && len(s.flight) < maxInFlight {
		e := s.waiting.pop()
		s.identify(e)
		e.dup = true
		s.fly(e)
		s.server.records.putEntry(s.id, e)
	}
}

// sendAgain sends an entry of flight on a new connection, as far as it had come (MQTT 5.0 §4.4). A message that the client
// may already have is sent even if it has expired meanwhile.
func (s *session) sendAgain(c *conn, to []byte, e *entry, now time.Time) []byte {
	if e.released {
		return packet.Append(to, &packet.Ack{Type: packet.PUBREL, ID: e.id}, c.level)
	}
	out, ok := c.appendMessage(to, &e.delivery, e.id, true, now)
	if !ok {
		s.server.lose(loss{s.id, e.topic, lossPacket})
		s.drop(e)
		return to
	}
	e.onWire = true
	s.window--
	return out
}

// queued returns the number of messages that wait for the client or for its acknowledgement, and their bytes.
func (s *session) queued() (messages int, bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waiting.len() + len(s.flight), s.bytes
}

// backlog returns the number of messages that do not count for the limits of the queue.
func (s *session) backlog() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.waiting0.len() + s.waiting.len() + len(s.flight) - s.counted - s.counted0
}

// removeExpired removes the messages that have expired before they were sent (MQTT 5.0 §3.3.2.3.3).
func (s *session) removeExpired(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	expired := func(e *entry) bool { return e.id == 0 && e.expired(now) }
	if !slices.ContainsFunc(s.waiting.all(), expired) {
		return
	}
	var rest fifo[*entry]
	for _, e := range s.waiting.all() {
		if expired(e) {
			s.drop(e)
		} else {
			rest.push(e)
		}
	}
	s.waiting = rest
}

// setExpiry changes how long the session outlives the connection.
func (s *session) setExpiry(c *conn, d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn == c {
		s.expiry = d
	}
}

// release notes that the client has a message with QoS 2. That has to be on the disk before the client gets PUBREL: from
// then on, it takes the same message for a new one. The session's lock is held.
func (s *session) release(e *entry) {
	e.released = true
	if e.kept {
		s.server.records.putEntry(s.id, e)
	}
}

// isReceived reports whether a message with QoS 2 from the client was passed on and not yet released.
func (s *session) isReceived(id uint16) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.received[id]
	return ok
}

// receive notes that a message with QoS 2 from the client is passed on. It returns false if the connection has lost the
// session, or the message was passed on before.
func (s *session) receive(c *conn, id uint16) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, twice := s.received[id]; twice || s.conn != c {
		return false
	}
	if s.received == nil {
		s.received = map[uint16]struct{}{}
	}
	s.received[id] = struct{}{}
	if s.persistent() {
		s.server.records.putReceived(s.id, id)
	}
	return true
}

// released forgets a message with QoS 2 from the client, and reports whether there was one. A connection that has lost the
// session changes nothing: the client may use the identifier for another message by now.
func (s *session) released(c *conn, id uint16) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.received[id]; !ok || s.conn != c {
		return false
	}
	delete(s.received, id)
	s.server.records.deleteReceived(s.id, id)
	return true
}
