package channel

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/containerd/errdefs"
)

// Key names a channel. Module is the index in its runtime.
type Key struct {
	Runtime string
	Module  int
	FD      int
}

type moduleKey struct {
	runtime string
	module  int
}

func (k Key) of() moduleKey { return moduleKey{k.Runtime, k.Module} }

// RouterOptions connect a Router to the broker, and limit it. The functions must neither block nor call the Router. Calls of
// Subscribe and Unsubscribe do not overlap; calls of Publish do.
type RouterOptions struct {
	Publish     func(topic string, qos byte, payload []byte)
	Subscribe   func(filter string, qos byte) // repeated for a subscribed filter when the quality changes or retained messages are wanted
	Unsubscribe func(filter string)
	// Held are filters that the node itself has subscribed to, with QoS 2. They stay when a module closes its channel on one.
	Held []string

	MaxChannels int // of one module; 0: MaxChannels
	MaxPayload  int // bytes of a module's message; 0: what a frame holds
}

// Stats are a Router's counters.
type Stats struct {
	Published  uint64 // messages of modules that were accepted
	Refused    uint64 // messages of modules that were refused
	Delivered  uint64 // messages given to channels
	FromBroker uint64 // messages from the broker
	Unmatched  uint64 // messages from the broker for no channel
}

// Router delivers between the channels of a node or a worker. Its methods may be called concurrently.
type Router struct {
	opts RouterOptions

	order sync.Mutex // serialises Open and Close, so that subscriptions change in their order
	roots []*filter  // subscribed filters with wildcards

	mu       sync.RWMutex // guards the fields below
	channels map[Key]*channel
	modules  map[moduleKey]map[Key]*channel
	table    table

	published, refused, delivered, fromBroker, unmatched atomic.Uint64
}

// channel is an open channel. Only seen changes after Open.
type channel struct {
	key     Key
	topic   string
	flags   Flags
	group   string
	deliver func(payload []byte)

	seenMu sync.Mutex
	seen   map[string]uint64 // hash of the last message from the broker, by topic
}

// NewRouter makes a Router without channels.
func NewRouter(opts RouterOptions) *Router {
	if opts.MaxChannels <= 0 {
		opts.MaxChannels = MaxChannels
	}
	r := &Router{
		opts:     opts,
		channels: map[Key]*channel{},
		modules:  map[moduleKey]map[Key]*channel{},
		table:    table{all: map[string]*filter{}},
	}
	for _, name := range opts.Held {
		f := &filter{name: name, wild: HasWildcard(name), held: true, qos: 2}
		f.root = f
		r.table.add(f)
		if f.wild {
			r.roots = append(r.roots, f)
		}
	}
	return r
}

// Open opens a channel. deliver is called with each message for it; it must not block, call the Router, or change the payload,
// which is shared. Channels of one group deliver to each other outside of the Router; "" is no group.
//
// Opening an open channel with the same topic and flags replaces deliver and group, as a runtime does that has reconnected; with
// others it is errdefs.ErrAlreadyExists. A channel above the module's limit is errdefs.ErrResourceExhausted.
func (r *Router) Open(key Key, o Open, group string, deliver func(payload []byte)) error {
	if err := o.Validate(); err != nil {
		return err
	}
	for _, prefix := range []string{Local, "$share/", "$queue/"} {
		if strings.HasPrefix(o.Topic, prefix) {
			return fmt.Errorf("channel %d on %q: topics below %s are reserved: %w", key.FD, o.Topic, prefix, errdefs.ErrInvalidArgument)
		}
	}
	r.order.Lock()
	defer r.order.Unlock()
	c := &channel{key: key, topic: o.Topic, flags: o.Flags, group: group, deliver: deliver}
	old := r.channels[key]
	switch {
	case old != nil && (old.topic != c.topic || old.flags != c.flags):
		return fmt.Errorf("channel %d is open on %q: it must be closed before it is opened on %q: %w", key.FD, old.topic, c.topic, errdefs.ErrAlreadyExists)
	case old == nil && len(r.modules[key.of()]) >= r.opts.MaxChannels:
		return fmt.Errorf("channel %d on %q: the module has %d channels open, which is the limit: %w", key.FD, o.Topic, r.opts.MaxChannels, errdefs.ErrResourceExhausted)
	}
	f, added := r.insert(c, old)
	if f != nil {
		r.subscribe(f, added)
	}
	return nil
}

// insert replaces old by the channel in the tables. It returns the channel's filter, if it reads, and whether that is new.
func (r *Router) insert(c, old *channel) (f *filter, added bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.channels[c.key] = c
	if r.modules[c.key.of()] == nil {
		r.modules[c.key.of()] = map[Key]*channel{}
	}
	r.modules[c.key.of()][c.key] = c
	if !c.flags.CanRead() {
		return nil, false
	}
	f = r.table.all[c.topic]
	if f == nil {
		f, added = &filter{name: c.topic, wild: HasWildcard(c.topic)}, true
		r.table.add(f)
	}
	// The slice is never changed in place: a Publish may be iterating over it.
	f.channels = append(without(f.channels, old), c)
	return f, added
}

func without(all []*channel, c *channel) []*channel {
	return slices.DeleteFunc(slices.Clone(all), func(o *channel) bool { return o == c })
}

// Close closes a channel; errdefs.ErrNotFound if it is not open. A message in flight may still be delivered.
func (r *Router) Close(key Key) error {
	r.order.Lock()
	defer r.order.Unlock()
	if !r.close(key) {
		return fmt.Errorf("close channel %d of module %d: it is not open: %w", key.FD, key.Module, errdefs.ErrNotFound)
	}
	return nil
}

// CloseModule closes all channels of a module.
func (r *Router) CloseModule(runtime string, module int) {
	r.order.Lock()
	defer r.order.Unlock()
	for key := range r.modules[moduleKey{runtime, module}] {
		r.close(key)
	}
}

// CloseRuntime closes all channels of a runtime's modules.
func (r *Router) CloseRuntime(runtime string) {
	r.order.Lock()
	defer r.order.Unlock()
	for key := range r.channels {
		if key.Runtime == runtime {
			r.close(key)
		}
	}
}

func (r *Router) close(key Key) bool {
	c := r.channels[key]
	if c == nil {
		return false
	}
	if f, last := r.take(c); last {
		r.unsubscribe(f)
	} else if f != nil {
		r.quality(f.root)
	}
	return true
}

// take removes the channel from the tables. It returns the filter that the channel read by, and whether it was the last there.
func (r *Router) take(c *channel) (f *filter, last bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.channels, c.key)
	delete(r.modules[c.key.of()], c.key)
	if len(r.modules[c.key.of()]) == 0 {
		delete(r.modules, c.key.of())
	}
	if !c.flags.CanRead() {
		return nil, false
	}
	f = r.table.all[c.topic]
	f.channels = without(f.channels, c)
	if len(f.channels) == 0 && !f.held {
		r.table.remove(f)
		return f, true
	}
	return f, false
}

// Publish delivers a module's message to all other channels that match, except those of the sender's group, and passes it to the
// broker. The payload must not be changed afterwards. Errors are errdefs.ErrNotFound (the channel is not open),
// ErrPermissionDenied (it is for reading) and ErrInvalidArgument (the message is too long).
func (r *Router) Publish(key Key, payload []byte) error {
	var few [16]*channel
	c, to, err := r.publish(few[:0], key, payload)
	if err != nil {
		r.refused.Add(1)
		return err
	}
	r.published.Add(1)
	for _, other := range to {
		if other != c && (c.group == "" || other.group != c.group) {
			r.delivered.Add(1)
			other.deliver(payload)
		}
	}
	r.opts.Publish(c.topic, c.flags.QoS(), payload)
	return nil
}

// publish checks a message and finds the channels that match.
func (r *Router) publish(few []*channel, key Key, payload []byte) (*channel, []*channel, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	c := r.channels[key]
	switch {
	case c == nil:
		return nil, nil, fmt.Errorf("publish on channel %d of module %d: it is not open: %w", key.FD, key.Module, errdefs.ErrNotFound)
	case !c.flags.CanWrite():
		return nil, nil, fmt.Errorf("publish on channel %d of module %d: it is open for reading: %w", key.FD, key.Module, errdefs.ErrPermissionDenied)
	case r.opts.MaxPayload > 0 && len(payload) > r.opts.MaxPayload:
		return nil, nil, fmt.Errorf("publish %d bytes on channel %d of module %d: the limit is %d: %w",
			len(payload), key.FD, key.Module, r.opts.MaxPayload, errdefs.ErrInvalidArgument)
	}
	return c, r.table.match(few, c.topic), nil
}

// FromBroker delivers a message from the broker to the channels that match.
func (r *Router) FromBroker(topic string, payload []byte) { r.from(topic, payload, false) }

// RetainedFromBroker delivers a message that the broker sent in answer to a subscription, to the channels that have not had it:
// subscriptions are shared and renewed.
func (r *Router) RetainedFromBroker(topic string, payload []byte) { r.from(topic, payload, true) }

func (r *Router) from(topic string, payload []byte, retained bool) {
	r.fromBroker.Add(1)
	var few [16]*channel
	r.mu.RLock()
	to := r.table.match(few[:0], topic)
	r.mu.RUnlock()
	if len(to) == 0 {
		r.unmatched.Add(1)
	}
	for _, c := range to {
		if c.fresh(topic, payload, retained) {
			r.delivered.Add(1)
			c.deliver(payload)
		}
	}
}

// Count is the number of channels that a module has open.
func (r *Router) Count(runtime string, module int) int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return len(r.modules[moduleKey{runtime, module}])
}

// Stats are the counters.
func (r *Router) Stats() Stats {
	return Stats{Published: r.published.Load(), Refused: r.refused.Load(), Delivered: r.delivered.Load(),
		FromBroker: r.fromBroker.Load(), Unmatched: r.unmatched.Load()}
}
