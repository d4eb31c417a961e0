package broker

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/tripod-run/tripod/internal/edge/packet"
)

// subscription is a session's subscription to a filter. It is guarded by server.mu.
type subscription struct {
	session *session
	packet.Subscription
	id    uint32 // Subscription Identifier; 0: none
	node  *node
	group *group // of a shared subscription; otherwise nil
}

// group is a shared subscription (MQTT 5.0 §4.8.2): each message goes to one of its members.
type group struct {
	name    string
	path    string // the filter without the group
	node    *node
	members []*subscription
	turn    atomic.Uint32
}

// target is what a session gets of a message by all its subscriptions together.
type target struct {
	session *session
	qos     byte
	retain  bool
	ids     []uint32
}

var targetLists = sync.Pool{New: func() any { return new([]target) }}

// publish passes a message on to all sessions that subscribe to its topic, and retains it. Before that it calls first, if
// that is not nil, and does nothing if first returns false; what first stores gets on the disk together with the message.
// The error, an *packet.Error, says why the message cannot be retained; then nobody gets it.
func (s *server) publish(m *message, first func() bool) error {
	end := s.store.begin()
	defer end()
	if first != nil && !first() {
		return nil
	}
	if m.retain { // exclusively, so that the message that is retained is the last one that subscribers get
		s.mu.Lock()
		defer s.mu.Unlock()
		if err := s.retain(m); err != nil {
			return err
		}
	} else {
		s.mu.RLock()
		defer s.mu.RUnlock()
	}
	list := targetLists.Get().(*[]target)
	targets := (*list)[:0]
	var index map[*session]int
	s.tree.match(m.topic, func(n *node) {
		if len(n.subs) > 0 {
			targets, index = addTargets(targets, index, n, m)
		}
		for _, g := range n.groups {
			g.publish(m)
		}
	})
	for i := range targets {
		t := &targets[i]
		s.pass(t.session, delivery{message: m, qos: t.qos, retain: t.retain, ids: t.ids})
	}
	clear(targets)
	*list = targets
	targetLists.Put(list)
	return nil
}

// pass gives a delivery to a session, and counts it if the session has no room. An absent client gets nothing with QoS 0.
func (s *server) pass(to *session, d delivery) {
	if !to.enqueue(d, nil, false) && (d.qos > 0 || to.online()) {
		s.drop(to, d.topic)
	}
}

// addTargets adds a node's subscriptions. A session with several subscriptions that match gets one copy, with the highest
// QoS and all identifiers (MQTT 5.0 §3.3.4). index has the places of the targets, once there are many.
func addTargets(targets []target, index map[*session]int, n *node, m *message) ([]target, map[*session]int) {
	known := len(targets)
	if index == nil && known > 16 {
		index = make(map[*session]int, known)
		for i := range targets {
			index[targets[i].session] = i
		}
	}
	for _, sub := range n.subs {
		if sub.NoLocal && sub.session.id == m.from {
			continue
		}
		var t *target
		if index != nil {
			if i, ok := index[sub.session]; ok {
				t = &targets[i]
			}
		} else {
			for i := range targets[:known] {
				if targets[i].session == sub.session {
					t = &targets[i]
				}
			}
		}
		if t == nil {
			if index != nil {
				index[sub.session] = len(targets)
			}
			targets = append(targets, target{session: sub.session})
			t = &targets[len(targets)-1]
		}
		t.qos = max(t.qos, min(m.qos, sub.QoS))
		t.retain = t.retain || m.retain && sub.RetainAsPublished
		if sub.id > 0 {
			t.ids = append(t.ids, sub.id)
		}
	}
	return targets, index
}

// publish gives a message to the next member that is connected and has room, or else to the next absent member whose
// session keeps it.
func (g *group) publish(m *message) {
	if len(g.members) == 0 { // the last one has unsubscribed
		return
	}
	start := int(g.turn.Add(1))
	if g.offer(m, start, true) || g.offer(m, start, false) {
		return
	}
	if missed := g.members[start%len(g.members)]; min(m.qos, missed.QoS) > 0 || missed.session.online() { // see pass
		missed.session.server.drop(missed.session, m.topic)
	}
}

func (g *group) offer(m *message, start int, online bool) bool {
	for i := range g.members {
		sub := g.members[(start+i)%len(g.members)]
		if sub.session.online() == online && sub.session.enqueue(sub.deliver(m, m.retain && sub.RetainAsPublished), g, false) {
			return true
		}
	}
	return false
}

// deliver returns the delivery of a message by this subscription alone.
func (sub *subscription) deliver(m *message, retain bool) delivery {
	d := delivery{message: m, qos: min(m.qos, sub.QoS), retain: retain}
	if sub.id > 0 {
		d.ids = []uint32{sub.id}
	}
	return d
}

// retain keeps a message as its topic's retained message, or removes the topic's if the message is empty (MQTT 5.0
// §3.3.1.3). server.mu is locked.
func (s *server) retain(m *message) error {
	if !keepable(m.topic) {
		return &packet.Error{Code: packet.TopicNameInvalid, Text: "the topic is too long to be retained"}
	}
	system := isSystem(m.topic)
	n := s.tree.at(m.topic, len(m.payload) > 0)
	if n == nil {
		return nil
	}
	old := n.retained
	if len(m.payload) == 0 {
		s.forgetRetained(n)
		return nil
	}
	if !system {
		bytes := m.held()
		count := 1
		if old != nil {
			bytes -= old.held()
			count = 0
		}
		if s.retainedCount+count > s.cfg.MaxRetained || s.retainedBytes+bytes > s.cfg.MaxRetainedBytes {
			n.prune()
			s.meet(limitRetained, m.from)
			return &packet.Error{Code: packet.QuotaExceeded, Text: "there is no room for another retained message"}
		}
		s.retainedCount += count
		s.retainedBytes += bytes
		s.records.putRetained(m, old)
	}
	s.place(n, m)
	return nil
}

// place sets or removes a node's retained message in memory. server.mu is locked.
func (s *server) place(n *node, m *message) {
	if old := n.retained; old != nil && !old.expires.IsZero() {
		s.expiring--
	}
	if n.retained = m; m != nil && !m.expires.IsZero() {
		s.expiring++
	}
}

// forgetRetained removes a node's retained message. server.mu is locked.
func (s *server) forgetRetained(n *node) {
	if old := n.retained; old != nil {
		s.place(n, nil)
		if !isSystem(old.topic) {
			s.retainedCount--
			s.retainedBytes -= old.held()
			s.records.deleteRetained(old)
		}
	}
	n.prune()
}

// sendRetained sends a subscription the retained messages that match it. Two overlapping subscriptions may each get all
// of them; a client that goes on to subscribe without reading gets no more. server.mu is locked.
func (s *server) sendRetained(sub *subscription, now time.Time) {
	if sub.session.backlog() > 2*s.retainedCount+s.cfg.MaxQueued {
		s.drop(sub.session, sub.Filter)
		return
	}
	var expired []*node
	s.tree.retained(sub.Filter, func(n *node) {
		m := n.retained
		switch {
		case m.expired(now):
			expired = append(expired, n)
		case sub.NoLocal && m.from == sub.session.id:
		default:
			sub.session.enqueue(sub.deliver(m, true), nil, true)
		}
	})
	for _, n := range expired {
		s.forgetRetained(n)
	}
}

// subscribe adds or replaces a subscription, and reports whether it is new. server.mu is locked.
func (s *server) subscribe(to *session, f packet.Subscription, id uint32) (sub *subscription, added bool) {
	if old := to.subs[f.Filter]; old != nil {
		old.Subscription, old.id = f, id
		return old, false
	}
	name, path, shared := packet.Shared(f.Filter)
	sub = &subscription{session: to, Subscription: f, id: id, node: s.tree.at(path, true)}
	if to.subs == nil {
		to.subs = map[string]*subscription{}
	}
	to.subs[f.Filter] = sub
	to.levels += int32(levels(f.Filter))
	s.subscriptions.Add(1)
	if !shared {
		sub.node.subs = append(sub.node.subs, sub)
		return sub, true
	}
	for _, g := range sub.node.groups {
		if g.name == name {
			sub.group = g
		}
	}
	if sub.group == nil {
		sub.group = &group{name: name, path: path, node: sub.node}
		sub.node.groups = append(sub.node.groups, sub.group)
	}
	sub.group.members = append(sub.group.members, sub)
	return sub, true
}

// unsubscribe removes a subscription, and reports whether there was one. server.mu is locked.
func (s *server) unsubscribe(from *session, filter string) bool {
	sub := from.subs[filter]
	if sub == nil {
		return false
	}
	delete(from.subs, filter)
	from.levels -= int32(levels(filter))
	s.subscriptions.Add(-1)
	n := sub.node
	if g := sub.group; g == nil {
		n.subs = without(n.subs, sub)
	} else if g.members = without(g.members, sub); len(g.members) == 0 {
		n.groups = without(n.groups, g)
	}
	n.prune()
	return true
}

// without removes an item from a list whose order does not matter.
func without[T comparable](list []T, item T) []T {
	for i := range list {
		if list[i] == item {
			last := len(list) - 1
			list[i] = list[last]
			clear(list[last:])
			return list[:last]
		}
	}
	return list
}
