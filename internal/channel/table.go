package channel

import "strings"

// filter is a topic filter with the channels that are open on it.
type filter struct {
	name     string
	wild     bool
	held     bool // RouterOptions.Held
	channels []*channel
	root     *filter // the subscribed filter that covers this one, or this filter itself
	qos      byte    // of the subscription, if this filter is a root
}

// ownQoS returns the highest QoS of the filter's channels. A held filter has QoS 2.
func (f *filter) ownQoS() byte {
	var qos byte
	if f.held {
		qos = 2
	}
	for _, c := range f.channels {
		qos = max(qos, c.flags.QoS())
	}
	return qos
}

// table finds filters by topic. It is a tree with the same levels as the topics.
type table struct {
	top level
	all map[string]*filter
}

type level struct {
	next   map[string]*level
	filter *filter // the filter that ends at this level
}

func (t *table) add(f *filter) {
	at := &t.top
	for rest, more := f.name, true; more; {
		var name string
		name, rest, more = strings.Cut(rest, "/")
		if at.next == nil {
			at.next = map[string]*level{}
		}
		if at.next[name] == nil {
			at.next[name] = &level{}
		}
		at = at.next[name]
	}
	at.filter = f
	t.all[f.name] = f
}

func (t *table) remove(f *filter) {
	delete(t.all, f.name)
	t.top.remove(f.name, true)
}

// remove removes the filter that has the given remaining levels, and every level of the tree that becomes empty.
func (l *level) remove(rest string, more bool) {
	if !more {
		l.filter = nil
		return
	}
	name, rest, more := strings.Cut(rest, "/")
	next := l.next[name]
	next.remove(rest, more)
	if next.filter == nil && len(next.next) == 0 {
		delete(l.next, name)
	}
}

// match appends the channels whose filter matches the topic.
func (t *table) match(to []*channel, topic string) []*channel {
	return t.top.match(to, topic, true, strings.HasPrefix(topic, "$"))
}

// match descends one level. special is set at the first level of a topic that begins with $, where wildcards do not
// match (MQTT 5.0 §4.7.2).
func (l *level) match(to []*channel, rest string, more, special bool) []*channel {
	if !special {
		if any := l.next["#"]; any != nil { // "a/#" matches "a" too
			to = append(to, any.filter.channels...)
		}
	}
	if !more {
		if l.filter != nil {
			to = append(to, l.filter.channels...)
		}
		return to
	}
	name, rest, more := strings.Cut(rest, "/")
	if next := l.next[name]; next != nil {
		to = next.match(to, rest, more, false)
	}
	if !special {
		if next := l.next["+"]; next != nil {
			to = next.match(to, rest, more, false)
		}
	}
	return to
}
