package channel

import (
	"hash/maphash"
	"maps"
	"slices"
)

// maxSeen is the number of topics of which a channel remembers the last message. On others it may get a retained message twice.
const maxSeen = 64

var seed = maphash.MakeSeed()

// subscribe subscribes to a filter that has a new channel, or renews the wider subscription that covers it. order is held.
func (r *Router) subscribe(f *filter, added bool) {
	if added {
		r.findRoot(f)
	}
	if f.root != f || !added {
		// Renewed even with the same quality: the broker then sends the retained messages again.
		f.root.qos = r.wanted(f.root)
		r.opts.Subscribe(f.root.name, f.root.qos)
		return
	}
	r.replace(f)
}

// findRoot sets the subscribed filter that covers f; without one, f itself.
func (r *Router) findRoot(f *filter) {
	f.root = f
	for _, wide := range r.roots {
		if wide != f && Covers(wide.name, f.name) {
			f.root = wide
			return
		}
	}
}

// replace subscribes to a filter that no other covers, and then unsubscribes from those that it covers.
func (r *Router) replace(f *filter) {
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
	f.qos = r.wanted(f)
	r.opts.Subscribe(f.name, f.qos)
	for _, other := range narrow {
		r.opts.Unsubscribe(other.name)
	}
}

// unsubscribe ends the subscription of a filter without channels, once the filters that it covered are subscribed to.
func (r *Router) unsubscribe(f *filter) {
	if f.root != f {
		r.quality(f.root)
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
	// Those with wildcards first: they may cover others.
	for _, wild := range []bool{true, false} {
		for _, o := range orphans {
			if o.wild == wild {
				r.adopt(o)
			}
		}
	}
	r.opts.Unsubscribe(f.name)
}

// adopt finds a new root for a filter that has lost its own.
func (r *Router) adopt(o *filter) {
	if r.findRoot(o); o.root == o {
		r.replace(o)
		return
	}
	r.quality(o.root)
}

// quality renews the subscription if its quality of service has changed.
func (r *Router) quality(root *filter) {
	if qos := r.wanted(root); qos != root.qos {
		root.qos = qos
		r.opts.Subscribe(root.name, qos)
	}
}

// wanted is the highest quality of service that the filter, or one that it covers, asks for.
func (r *Router) wanted(root *filter) byte {
	qos := root.wants()
	if root.wild {
		for _, f := range r.table.all {
			if f.root == root {
				qos = max(qos, f.wants())
			}
		}
	}
	return qos
}

// fresh reports whether to deliver a message from the broker. A retained message that equals the last one on its topic is one
// that the channel has had.
func (c *channel) fresh(topic string, payload []byte, retained bool) bool {
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
