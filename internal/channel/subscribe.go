package channel

import (
	"hash/maphash"
	"maps"
	"slices"
)

// maxSeen bounds of how many topics a channel remembers the last message; above it, it may be given a retained one twice.
const maxSeen = 64

var seed = maphash.MakeSeed()

// subscribe has the broker send the messages of a filter that got a channel. A wider filter that is subscribed to brings them
// already; a new one takes the place of those that it covers. Whoever calls it holds order.
func (r *Router) subscribe(f *filter, added bool) {
	if added {
		r.findRoot(f)
	}
	if f.root != f || !added {
		// Also for the retained messages: the broker sends them when it is asked again.
		f.root.qos = r.wanted(f.root)
		r.opts.Subscribe(f.root.name, f.root.qos)
		return
	}
	r.replace(f)
}

// findRoot finds the subscribed filter that covers f: itself if there is none.
func (r *Router) findRoot(f *filter) {
	f.root = f
	for _, wide := range r.roots {
		if wide != f && covers(wide.name, f.name) {
			f.root = wide
			return
		}
	}
}

// replace subscribes to a filter that nothing covers, in place of those that it covers.
func (r *Router) replace(f *filter) {
	var narrow []*filter
	if f.wild {
		for _, other := range r.table.all {
			if other != f && !other.root.held && covers(f.name, other.name) {
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

// unsubscribe ends a filter that has no channel any more. Those that it covered are subscribed to first.
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
	// The wide ones first: they may cover others.
	for _, wild := range []bool{true, false} {
		for _, o := range orphans {
			if o.wild == wild {
				r.adopt(o)
			}
		}
	}
	r.opts.Unsubscribe(f.name)
}

// adopt finds an orphan's new root, and subscribes to it if it is its own.
func (r *Router) adopt(o *filter) {
	if r.findRoot(o); o.root == o {
		r.replace(o)
		return
	}
	r.quality(o.root)
}

// quality renews a subscription whose quality of service is another one now.
func (r *Router) quality(root *filter) {
	if qos := r.wanted(root); qos != root.qos {
		root.qos = qos
		r.opts.Subscribe(root.name, qos)
	}
}

// wanted is the highest quality of service that the filter or one that it covers asks for.
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

// fresh tells whether a message of the broker is to be delivered: a retained one is not if it is the last one on its topic that
// the channel was given.
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
