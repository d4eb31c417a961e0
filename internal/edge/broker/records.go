package broker

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tripod-run/tripod/internal/edge/packet"
)

// Keys in the store. NUL separates their parts, because MQTT strings cannot contain it. Numbers are hexadecimal.
//
//	b MESSAGE                 body: a message, as long as one of the following refers to it
//	c CLIENT                  sessionRecord
//	s CLIENT NUL FILTER       subscriptionRecord
//	m CLIENT NUL ORDER        entryRecord: a message with QoS 1 or 2 for this client
//	q CLIENT NUL PACKET-ID    nothing: a message with QoS 2 by this client that was passed on and not yet released
//	r TOPIC                   the number of the retained message
//	w CLIENT NUL NUMBER       willRecord
const (
	bodyKey, clientKey, subKey, messageKey, receivedKey, retainedKey, willKey = "b", "c", "s", "m", "q", "r", "w"
	nul                                                                       = "\x00"
)

type body struct {
	Topic   string    `json:"topic"`
	Payload []byte    `json:"payload,omitempty"`
	Props   []byte    `json:"props,omitempty"`
	QoS     byte      `json:"qos,omitempty"`
	Retain  bool      `json:"retain,omitempty"`
	From    string    `json:"from,omitempty"`
	Expires time.Time `json:"expires,omitzero"`
	// Left is the time from when this was written until Expires. It bounds the message's life if the clock is set back.
	Left time.Duration `json:"left,omitempty"`
}

type sessionRecord struct {
	User   string        `json:"user,omitempty"`
	Expiry time.Duration `json:"expiry"`
	// Ended is when the last connection ended; zero if there was a connection when this was written.
	Ended time.Time `json:"ended,omitzero"`
}

type subscriptionRecord struct {
	QoS               byte   `json:"qos,omitempty"`
	NoLocal           bool   `json:"noLocal,omitempty"`
	RetainAsPublished bool   `json:"retainAsPublished,omitempty"`
	RetainHandling    byte   `json:"retainHandling,omitempty"`
	ID                uint32 `json:"id,omitempty"`
}

type entryRecord struct {
	Message  uint64   `json:"message"`
	ID       uint16   `json:"id,omitempty"`
	QoS      byte     `json:"qos"`
	Retain   bool     `json:"retain,omitempty"`
	Dup      bool     `json:"dup,omitempty"`
	Released bool     `json:"released,omitempty"`
	Free     bool     `json:"free,omitempty"`
	IDs      []uint32 `json:"ids,omitempty"`
	Share    string   `json:"share,omitempty"` // filter of the shared subscription
}

type willRecord struct {
	body
	User   string        `json:"user,omitempty"`
	Expiry time.Duration `json:"expiry,omitempty"`
	Delay  time.Duration `json:"delay,omitempty"`
	Grace  time.Duration `json:"grace"`
	Due    time.Time     `json:"due,omitzero"`
}

// records writes the broker's state into the store. Without a file it does nothing.
type records struct {
	store *store

	mu   sync.Mutex
	last uint64 // number of the last message or will
}

func newRecords(s *store) *records { return &records{store: s} }

func (r *records) put(key string, v any) {
	data, err := json.Marshal(v) // cannot fail for these structs
	if err == nil {
		r.store.put(key, data, true)
	}
}

// refer counts a record that needs a message's body, and returns the message's number.
func (r *records) refer(m *message) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m.id == 0 {
		r.last++
		m.id = r.last
	}
	if m.refs++; m.refs == 1 {
		r.put(bodyKey+number(m.id), m.body())
	}
	return m.id
}

// release is the opposite of refer.
func (r *records) release(m *message) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m.refs--; m.refs == 0 {
		r.store.del(bodyKey+number(m.id), false)
	}
}

func number(n uint64) string { return fmt.Sprintf("%016x", n) }

func (m *message) body() body {
	b := body{Topic: m.topic, Payload: m.payload, Props: m.props, QoS: m.qos, Retain: m.retain, From: m.from}
	if !m.expires.IsZero() {
		b.Expires, b.Left = m.expires.Round(0), time.Until(m.expires)
	}
	return b
}

func (b *body) message() message {
	m := message{topic: b.Topic, payload: b.Payload, props: b.Props, qos: b.QoS, retain: b.Retain, from: b.From}
	if !b.Expires.IsZero() {
		m.expires = time.Now().Add(min(time.Until(b.Expires), b.Left)) // from now on independent of changes to the clock
	}
	return m
}

func entryKey(client string, e *entry) string { return messageKey + client + nul + number(e.order) }

func (r *records) putEntry(client string, e *entry) {
	if r.store.db == nil {
		return
	}
	if !e.kept {
		e.kept = true
		r.refer(e.message)
	}
	record := entryRecord{Message: e.message.id, ID: e.id, QoS: e.qos, Retain: e.retain, Dup: e.dup, Released: e.released, Free: e.free,
		IDs: e.ids}
	if e.share != nil {
		record.Share = packet.SharePrefix + e.share.name + "/" + e.share.path
	}
	r.put(entryKey(client, e), record)
}

func (r *records) deleteEntry(client string, e *entry) {
	e.kept = false
	r.store.del(entryKey(client, e), false)
	r.release(e.message)
}

// putSession stores a session, without its subscriptions and messages. The session's lock is not held.
func (r *records) putSession(s *session) {
	s.mu.Lock()
	record := sessionRecord{User: s.user, Expiry: s.expiry}
	if s.conn == nil {
		record.Ended = s.ended.Round(0)
	}
	s.mu.Unlock()
	r.put(clientKey+s.id, record)
}

func (r *records) deleteSession(client string) { r.store.del(clientKey+client, true) }

func (r *records) putSubscription(sub *subscription) {
	r.put(subKey+sub.session.id+nul+sub.Filter, subscriptionRecord{sub.QoS, sub.NoLocal, sub.RetainAsPublished, sub.RetainHandling, sub.id})
}

func (r *records) deleteSubscription(client, filter string) {
	r.store.del(subKey+client+nul+filter, true)
}

func receivedID(client string, id uint16) string {
	return receivedKey + client + nul + strconv.FormatUint(uint64(id), 16)
}

func (r *records) putReceived(client string, id uint16) {
	r.store.put(receivedID(client, id), []byte{}, true)
}

// deleteReceived is urgent, because PUBCOMP lets the client use the identifier for another message.
func (r *records) deleteReceived(client string, id uint16) { r.store.del(receivedID(client, id), true) }

// putRetained stores a retained message in place of the topic's previous one.
func (r *records) putRetained(m, old *message) {
	if r.store.db == nil {
		return
	}
	r.put(retainedKey+m.topic, r.refer(m))
	if old != nil {
		r.release(old)
	}
}

func (r *records) deleteRetained(m *message) {
	if r.store.db == nil {
		return
	}
	r.store.del(retainedKey+m.topic, true)
	r.release(m)
}

// putWill stores a will, or its change.
func (r *records) putWill(w *will) {
	r.mu.Lock()
	if w.number == 0 {
		r.last++
		w.number = r.last
	}
	r.mu.Unlock()
	r.put(willKey+w.client+nul+number(w.number), willRecord{w.message.body(), w.user, w.expiry, w.delay, w.grace, w.due.Round(0)})
}

func (r *records) deleteWill(w *will) { r.store.del(willKey+w.client+nul+number(w.number), true) }

// load fills the server from the store. It removes the sessions of users that are not configured any more, what their
// users may not read any more, and what belongs to no session.
func (s *server) load() error {
	l := loader{server: s, now: time.Now(), messages: map[uint64]*message{}}
	end := s.store.begin()
	err := l.all()
	end()
	if err != nil {
		return fmt.Errorf("broker: %s: %w", s.cfg.Path, err)
	}
	s.publishWills(l.late)
	return nil
}

// load passes every stored value of a kind to a function. It removes a value from the store if the value is unreadable,
// or if the function returns false.
func load[T any](s *server, prefix string, want func(key string, v T) bool) error {
	var remove []string
	err := s.store.each(prefix, func(key string, value []byte) error {
		var v T
		if len(value) > 0 {
			if err := json.Unmarshal(value, &v); err != nil {
				s.log.Error("broker: removing an unreadable value from the store", "key", prefix+key, "err", err)
				remove = append(remove, prefix+key)
				return nil
			}
		}
		if !want(key, v) {
			remove = append(remove, prefix+key)
		}
		return nil
	})
	for _, key := range remove {
		s.store.del(key, false)
	}
	return err
}

type loader struct {
	*server
	now      time.Time
	messages map[uint64]*message
	late     []*will // to be published at once
}

// all loads everything. Its lock keeps out the timers of what has expired meanwhile.
func (l *loader) all() error {
	s := l.server
	s.mu.Lock()
	defer s.mu.Unlock()
	err := errors.Join(
		load(s, bodyKey, l.body), load(s, clientKey, l.session), load(s, subKey, l.subscription), load(s, messageKey, l.entry),
		load(s, receivedKey, l.received), load(s, retainedKey, l.retain), load(s, willKey, l.will),
	)
	if err != nil {
		return err
	}
	for _, m := range l.messages {
		if m.refs == 0 {
			s.store.del(bodyKey+number(m.id), false)
		}
	}
	for _, one := range s.sessions {
		one.recoverFlight()
		s.expireSession(one, time.Until(one.ended.Add(one.expiry)))
	}
	return nil
}

func (l *loader) body(key string, b body) bool {
	id, err := strconv.ParseUint(key, 16, 64)
	if err != nil {
		return false
	}
	m := b.message()
	m.id = id
	if !b.Expires.IsZero() && time.Until(b.Expires) > b.Left { // the clock was set back
		l.records.put(bodyKey+key, m.body())
	}
	l.messages[id] = &m
	l.records.last = max(l.records.last, id)
	return true
}

func (l *loader) session(client string, r sessionRecord) bool {
	if !l.users.known(r.User) {
		l.log.Warn("broker: removing the session of a user that is not configured", "client", client, "user", r.User)
		return false
	}
	one := l.newSession(client, r.User)
	one.expiry, one.ended = min(r.Expiry, l.cfg.SessionExpiry), r.Ended // the limit may be lower now
	one.wasOnline = one.ended.IsZero()                                  // the broker was killed
	if one.wasOnline || one.ended.After(l.now) {                        // or the clock was set back
		one.ended = l.now
		l.records.putSession(one)
	}
	l.sessions[client] = one
	return true
}

func (l *loader) subscription(key string, r subscriptionRecord) bool {
	client, filter, _ := strings.Cut(key, nul)
	one := l.sessions[client]
	if one == nil || !packet.ValidFilter(filter) || !l.users.allowed(one.user, client, filter, false) {
		return false
	}
	l.subscribe(one, packet.Subscription{Filter: filter, QoS: r.QoS, NoLocal: r.NoLocal, RetainAsPublished: r.RetainAsPublished,
		RetainHandling: r.RetainHandling}, r.ID)
	return true
}

func (l *loader) entry(key string, r entryRecord) bool {
	client, order, _ := strings.Cut(key, nul)
	one, m := l.sessions[client], l.messages[r.Message]
	n, err := strconv.ParseUint(order, 16, 64)
	if err != nil || one == nil || m == nil || !l.users.allowed(one.user, client, m.topic, false) {
		return false
	}
	m.refs++
	e := &entry{delivery: delivery{message: m, qos: r.QoS, retain: r.Retain, free: r.Free, ids: r.IDs}, order: n, id: r.ID, dup: r.Dup,
		released: r.Released, kept: true}
	if sub := one.subs[r.Share]; r.Share != "" && sub != nil {
		e.share = sub.group
	}
	one.order = max(one.order, n)
	if !e.free {
		one.counted++
		one.bytes += e.size()
	}
	switch {
	case e.id != 0 && (e.dup || e.released || one.wasOnline):
		if !e.dup {
			e.dup = true
			l.records.putEntry(client, e)
		}
		one.fly(e)
		one.lastID = max(one.lastID, e.id)
	default:
		e.id = 0
		one.waiting.push(e)
	}
	return true
}

func (l *loader) received(key string, _ struct{}) bool {
	client, hex, _ := strings.Cut(key, nul)
	id, err := strconv.ParseUint(hex, 16, 16)
	one := l.sessions[client]
	if one == nil || err != nil {
		return false
	}
	if one.received == nil {
		one.received = map[uint16]struct{}{}
	}
	one.received[uint16(id)] = struct{}{}
	return true
}

func (l *loader) retain(topic string, id uint64) bool {
	m := l.messages[id]
	if m == nil || m.expired(l.now) || m.topic != topic {
		return false
	}
	m.refs++
	l.place(l.tree.at(topic, true), m)
	l.retainedCount++
	l.retainedBytes += m.held()
	return true
}

func (l *loader) will(key string, r willRecord) bool {
	client, hex, _ := strings.Cut(key, nul)
	n, err := strconv.ParseUint(hex, 16, 64)
	if err != nil {
		return false
	}
	l.records.last = max(l.records.last, n)
	w := &will{client: client, number: n, user: r.User, message: r.message(), expiry: r.Expiry, delay: r.Delay, grace: r.Grace}
	w.deferred = r.Due.IsZero() || r.Delay == 0 // without a delay, only an earlier start has set when it is due
	after := cmp.Or(r.Delay, r.Grace)
	if !r.Due.IsZero() {
		after = min(max(time.Until(r.Due), 0), after) // no later than that, even if the clock was set back
	}
	if earlier := l.pullWill(client); earlier != nil { // the next connection had begun already
		l.late = append(l.late, earlier)
	}
	l.delayWill(w, after)
	return true
}
