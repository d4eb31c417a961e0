package channel

import "strings"

// filter is one filter with the channels that read by it.
type filter struct {
	name     string
	wild     bool
	held     bool // by the node itself: Options.Held
	channels []*channel
	root     *filter // the filter whose subscription brings its messages: itself, or a wider one
	qos      byte    // of the subscription, where root is itself
}

// wants is the quality of service that the filter's channels ask for; the node's own is the highest.
func (f *filter) wants() byte {
	var qos byte
	if f.held {
		qos = 2
	}
	for _, c := range f.channels {
		qos = max(qos, c.flags.QoS())
	}
	return qos
}

// table finds filters by topic: a tree with a level of topics for each of its own.
type table struct {
	top level
	all map[string]*filter
}

type level struct {
	next   map[string]*level
	filter *filter // ends here
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

// remove takes the filter below the level out, and the levels that are empty then.
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

// match goes down by one level; special tells that the topic begins with $, which no wildcard of the first level matches
// (MQTT 5.0 §4.7.2).
func (l *level) match(to []*channel, rest string, more, special bool) []*channel {
	if !special {
		if any := l.next["#"]; any != nil { // "a/#" is for "a" too
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

// covers tells whether the wide filter matches whatever the other one does; a no may be wrong for unusual pairs.
func covers(wide, other string) bool {
	if strings.HasPrefix(other, "$") && (strings.HasPrefix(wide, "+") || strings.HasPrefix(wide, "#")) {
		return false
	}
	for {
		if wide == "#" {
			return true
		}
		var w, o string
		var moreW, moreO bool
		w, wide, moreW = strings.Cut(wide, "/")
		o, other, moreO = strings.Cut(other, "/")
		switch {
		case o == "#", w != "+" && w != o:
			return false
		case !moreO:
			return !moreW || wide == "#"
		case !moreW:
			return false
		}
	}
}
