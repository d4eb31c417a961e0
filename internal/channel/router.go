package channel

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/containerd/errdefs"
)

// Key names a channel. Module is the module's index in its runtime.
type Key struct {
	Runtime string
	Module  int
	FD      int
}

type moduleKey struct {
	runtime string
	module  int
}

func (k Key) moduleKey() moduleKey { return moduleKey{k.Runtime, k.Module} }

// RouterOptions connect a Router to the broker, and set the Router's limits. The functions must neither block nor call
// the Router. Calls to Subscribe and Unsubscribe do not overlap; calls to Publish can.
type RouterOptions struct {
	Publish func(from Key, topic string, qos byte, payload []byte, settled func()) // settled is that of Router.Publish
	// also called for a subscribed filter, to change its QoS or to get its retained messages again
	Subscribe   func(filter string, qos byte)
	Unsubscribe func(filter string)
	// Held are the filters of the node's own subscriptions, with QoS 2. These subscriptions remain when a module closes
	// a channel on the same filter.
	Held []string

	MaxChannels int // of one module; 0 means the constant MaxChannels
	MaxPayload  int // of a module's message, in bytes; 0 means that only the frame's limit applies
}

// Stats holds a Router's counters.
type Stats struct {
	Published  uint64 // accepted messages from modules
	Refused    uint64 // refused messages from modules
	Delivered  uint64 // messages delivered to channels
	FromBroker uint64 // messages from the broker
	Unmatched  uint64 // messages from the broker that match no channel
}

// Router delivers messages between the channels of a node or a worker. Its methods may be called concurrently.
type Router struct {
	opts RouterOptions

	order sync.Mutex // serializes Open and Close, so that subscriptions change in the same order
	roots []*filter  // subscribed filters with wildcards

	mu       sync.RWMutex // guards the fields below
	channels map[Key]*channel
	modules  map[moduleKey]map[Key]*channel
	table    table

	published, refused, delivered, fromBroker, unmatched atomic.Uint64
}

// channel is an open channel. After Open, only the field seen changes.
type channel struct {
	key     Key
	topic   string
	flags   Flags
	group   string
	deliver func(payload []byte)

	seenMu sync.Mutex
	seen   map[string]uint64 // hash of the last message from the broker on each topic
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

// Open opens a channel. The Router passes each message for the channel to the function deliver. This function must not
// block, call the Router, or change the payload, because other channels get the same payload. Channels of the same
// group exchange messages without the Router; "" means no group.
//
// If the channel is already open with the same topic and flags, for example because the runtime has reconnected, Open
// replaces the channel's deliver function and group. If the topic or the flags differ, Open returns
// errdefs.ErrAlreadyExists. If the module has reached its limit of channels, Open returns errdefs.ErrResourceExhausted.
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
		return fmt.Errorf("channel %d is open on %q: close it before opening it on %q: %w", key.FD, old.topic, c.topic, errdefs.ErrAlreadyExists)
	case old == nil && len(r.modules[key.moduleKey()]) >= r.opts.MaxChannels:
		return fmt.Errorf("channel %d on %q: the module has %d open channels, which is the limit: %w", key.FD, o.Topic, r.opts.MaxChannels,
			errdefs.ErrResourceExhausted)
	}
	f, added := r.insert(c, old)
	if f != nil {
		r.subscribe(f, added)
	}
	return nil
}

// insert puts a channel into the tables. If old is not nil, the new channel replaces it. If the channel can be read,
// insert returns its filter, and whether the filter is new.
func (r *Router) insert(c, old *channel) (f *filter, added bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.channels[c.key] = c
	if r.modules[c.key.moduleKey()] == nil {
		r.modules[c.key.moduleKey()] = map[Key]*channel{}
	}
	r.modules[c.key.moduleKey()][c.key] = c
	if !c.flags.CanRead() {
		return nil, false
	}
	f = r.table.all[c.topic]
	if f == nil {
		f, added = &filter{name: c.topic, wild: HasWildcard(c.topic)}, true
		r.table.add(f)
	}
	// Replace the slice instead of changing it, because a Publish may be iterating over it.
	f.channels = append(without(f.channels, old), c)
	return f, added
}

func without(all []*channel, c *channel) []*channel {
	return slices.DeleteFunc(slices.Clone(all), func(o *channel) bool { return o == c })
}

// Close closes a channel. It returns errdefs.ErrNotFound if the channel is not open. A message in flight may still be
// delivered.
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
	if f, last := r.removeChannel(c); last {
		r.unsubscribe(f)
	} else if f != nil {
		r.updateQoS(f.root)
	}
	return true
}

// removeChannel removes a channel from the tables. If the channel can be read, removeChannel returns its filter, and
// whether c was the filter's last channel.
func (r *Router) removeChannel(c *channel) (f *filter, last bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.channels, c.key)
	delete(r.modules[c.key.moduleKey()], c.key)
	if len(r.modules[c.key.moduleKey()]) == 0 {
		delete(r.modules, c.key.moduleKey())
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

// Publish passes a module's message to the broker, and delivers it to all other matching channels, except those of the
// sender's group. The caller must not change the payload afterwards. Errors are errdefs.ErrNotFound (the channel is not
// open), ErrPermissionDenied (it is read-only) and ErrInvalidArgument (the message is too long). The function settled
// (Message.Settled), which can be nil, goes to the broker with the message, and is not called after an error.
func (r *Router) Publish(key Key, payload []byte, settled func()) error {
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
	r.opts.Publish(key, c.topic, c.flags.QoS(), payload, settled)
	return nil
}

// publish checks a message and finds the matching channels.
func (r *Router) publish(few []*channel, key Key, payload []byte) (*channel, []*channel, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	c := r.channels[key]
	switch {
	case c == nil:
		return nil, nil, fmt.Errorf("publish on channel %d of module %d: it is not open: %w", key.FD, key.Module, errdefs.ErrNotFound)
	case !c.flags.CanWrite():
		return nil, nil, fmt.Errorf("publish on channel %d of module %d: it is open for reading only: %w", key.FD, key.Module,
			errdefs.ErrPermissionDenied)
	case r.opts.MaxPayload > 0 && len(payload) > r.opts.MaxPayload:
		return nil, nil, fmt.Errorf("publish %d bytes on channel %d of module %d: the limit is %d: %w",
			len(payload), key.FD, key.Module, r.opts.MaxPayload, errdefs.ErrInvalidArgument)
	}
	return c, r.table.match(few, c.topic), nil
}

// FromBroker delivers a message from the broker to the matching channels.
func (r *Router) FromBroker(topic string, payload []byte) { r.deliverFromBroker(topic, payload, false) }

// RetainedFromBroker delivers a retained message from the broker to the matching channels that have not received it
// yet. The broker can send a retained message again, because a new channel renews the subscription that it shares with
// other channels.
func (r *Router) RetainedFromBroker(topic string, payload []byte) {
	r.deliverFromBroker(topic, payload, true)
}

func (r *Router) deliverFromBroker(topic string, payload []byte, retained bool) {
	r.fromBroker.Add(1)
	var few [16]*channel
	r.mu.RLock()
	to := r.table.match(few[:0], topic)
	r.mu.RUnlock()
	if len(to) == 0 {
		r.unmatched.Add(1)
	}
	for _, c := range to {
		if c.isNew(topic, payload, retained) {
			r.delivered.Add(1)
			c.deliver(payload)
		}
	}
}

// Topic returns the topic of an open channel, or "" if it is not open.
func (r *Router) Topic(key Key) string {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if c := r.channels[key]; c != nil {
		return c.topic
	}
	return ""
}

// Count returns the number of a module's open channels.
func (r *Router) Count(runtime string, module int) int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return len(r.modules[moduleKey{runtime, module}])
}

// Stats returns the counters.
func (r *Router) Stats() Stats {
	return Stats{Published: r.published.Load(), Refused: r.refused.Load(), Delivered: r.delivered.Load(),
		FromBroker: r.fromBroker.Load(), Unmatched: r.unmatched.Load()}
}
