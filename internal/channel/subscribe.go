package channel

import (
	"hash/maphash"
	"maps"
	"slices"
)

// maxSeen is the maximum number of topics on which a channel remembers its last message. On other topics, the channel
// can get a retained message twice.
const maxSeen = 64

var seed = maphash.MakeSeed()

// subscribe subscribes to a filter that has a new channel, or renews the wider subscription that covers it. The caller
// holds r.order.
func (r *Router) subscribe(f *filter, added bool) {
	if added {
		r.findRoot(f)
	}
	if f.root != f || !added {
		// Renew the subscription even with the same QoS, so that the broker sends the retained messages again.
		f.root.qos = r.rootQoS(f.root)
		r.opts.Subscribe(f.root.name, f.root.qos)
		return
	}
	r.makeRoot(f)
}

// findRoot sets f's root: a subscribed filter that covers f, or f itself.
func (r *Router) findRoot(f *filter) {
	f.root = f
	for _, wide := range r.roots {
		if wide != f && Covers(wide.name, f.name) {
			f.root = wide
			return
		}
	}
}

// makeRoot subscribes to a filter that no other filter covers, and then unsubscribes from the filters that f covers.
func (r *Router) makeRoot(f *filter) {
	var narrow []*filter
	if f.wild {
		for _, other := range r.table.all {
			if other != f && !other.root.held && Covers(f.name, other.name) {
				if other.root == other {
					narrow = append(narrow, other)
				}
				other.root = f
			}
		}
		r.roots = slices.DeleteFunc(r.roots, func(o *filter) bool { return o.root != o })
		r.roots = append(r.roots, f)
	}
	f.qos = r.rootQoS(f)
	r.opts.Subscribe(f.name, f.qos)
	for _, other := range narrow {
		r.opts.Unsubscribe(other.name)
	}
}

// unsubscribe ends the subscription of a filter without channels. It first subscribes to the filters that only this
// filter covered.
func (r *Router) unsubscribe(f *filter) {
	if f.root != f {
		r.updateQoS(f.root)
		return
	}
	var orphans []*filter
	if f.wild {
		r.roots = slices.DeleteFunc(r.roots, func(o *filter) bool { return o == f })
		for _, name := range slices.Sorted(maps.Keys(r.table.all)) {
			if other := r.table.all[name]; other.root == f {
				orphans = append(orphans, other)
			}
		}
	}
	// Begin with the filters that have wildcards, because they can cover other filters.
	for _, wild := range []bool{true, false} {
		for _, o := range orphans {
			if o.wild == wild {
				r.adopt(o)
			}
		}
	}
	r.opts.Unsubscribe(f.name)
}

// adopt finds a new root for a filter that has lost its root.
func (r *Router) adopt(o *filter) {
	if r.findRoot(o); o.root == o {
		r.makeRoot(o)
		return
	}
	r.updateQoS(o.root)
}

// updateQoS renews a subscription if its QoS has changed.
func (r *Router) updateQoS(root *filter) {
	if qos := r.rootQoS(root); qos != root.qos {
		root.qos = qos
		r.opts.Subscribe(root.name, qos)
	}
}

// rootQoS returns the highest QoS among a root and the filters that it covers.
func (r *Router) rootQoS(root *filter) byte {
	qos := root.ownQoS()
	if root.wild {
		for _, f := range r.table.all {
			if f.root == root {
				qos = max(qos, f.ownQoS())
			}
		}
	}
	return qos
}

// isNew reports whether to deliver a message from the broker. It returns false for a retained message that equals the
// channel's last message on the topic, because the channel already has it.
func (c *channel) isNew(topic string, payload []byte, retained bool) bool {
	hash := maphash.Bytes(seed, payload)
	c.seenMu.Lock()
	defer c.seenMu.Unlock()
	last, seen := c.seen[topic]
	if retained && seen && last == hash {
		return false
	}
	if c.seen == nil {
		c.seen = map[string]uint64{}
	}
	if seen || len(c.seen) < maxSeen {
		c.seen[topic] = hash
	}
	return true
}
