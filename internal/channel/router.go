package channel

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/containerd/errdefs"
)

// Key names a channel: the module is an index in its runtime.
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

// RouterOptions are a Router's way to the broker, and its limits. The functions must not block, nor call the Router. Subscribe and
// Unsubscribe are called one after the other; Publish is called by many at once.
type RouterOptions struct {
	Publish     func(topic string, qos byte, payload []byte)
	Subscribe   func(filter string, qos byte) // again for a filter that is subscribed to: the quality has changed, or retained messages are wanted
	Unsubscribe func(filter string)
	// Held are filters that the node itself has subscribed to, with QoS 2. A module that opens one of them, and closes it, does
	// not take it from the node.
	Held []string

	MaxChannels int // of one module; 0: MaxChannels
	MaxPayload  int // bytes of a module's message; 0: as the frames allow
}

// Stats counts what a Router did since it was made.
type Stats struct {
	Published  uint64 // messages of modules that were taken
	Refused    uint64 // messages of modules that were not
	Delivered  uint64 // messages given to channels
	FromBroker uint64 // messages of the broker
	Unmatched  uint64 // messages of the broker that no channel wanted
}

// Router joins the channels of a node. All its methods may be called at any time, from many goroutines.
type Router struct {
	opts RouterOptions

	order sync.Mutex // of Open and Close: the broker hears of the changes in their order
	roots []*filter  // subscribed filters with wildcards

	mu       sync.RWMutex // of what follows
	channels map[Key]*channel
	modules  map[moduleKey]map[Key]*channel
	table    table

	published, refused, delivered, fromBroker, unmatched atomic.Uint64
}

// channel is one open channel. Only seen changes after it was opened.
type channel struct {
	key     Key
	topic   string
	flags   Flags
	group   string
	deliver func(payload []byte)

	seenMu sync.Mutex
	seen   map[string]uint64 // the broker's last messages that it was given: a hash by topic
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

// Open opens a channel. deliver is called with each message for it; it must not block, nor call the Router, nor change the
// payload, which others have too. Group is the worker that carries messages between its own channels, "" if there is none.
//
// Opening a channel again in the same way replaces deliver and group (a runtime has connected anew); in another way it is
// errdefs.ErrAlreadyExists. A channel above the module's limit is errdefs.ErrResourceExhausted.
func (r *Router) Open(key Key, o Open, group string, deliver func(payload []byte)) error {
	if err := o.Validate(); err != nil {
		return err
	}
	for _, prefix := range []string{Local, "$share/", "$queue/"} {
		if strings.HasPrefix(o.Topic, prefix) {
			return fmt.Errorf("channel %d on %q: a channel cannot have a topic below %s here: %w", key.FD, o.Topic, prefix, errdefs.ErrInvalidArgument)
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

// insert puts the channel into the tables, and the old one with its key out. It returns the channel's filter if it reads.
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
	// The slice is never changed in place: a Publish may be going through it.
	f.channels = append(without(f.channels, old), c)
	return f, added
}

func without(all []*channel, c *channel) []*channel {
	return slices.DeleteFunc(slices.Clone(all), func(o *channel) bool { return o == c })
}

// Close closes a channel; errdefs.ErrNotFound if it is not open. A message that is under way may still be delivered.
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

// take takes the channel out of the tables; it returns the filter that it read by, and whether that ended with it.
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

// Publish takes a message of a module: it is delivered to the other channels of the node that it is for, except those of the
// sender's group, and goes to the broker. The payload must not be changed afterwards. The errors are errdefs.ErrNotFound (the
// channel is not open), ErrPermissionDenied (it is for reading) and ErrInvalidArgument (the message is too long).
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

// publish checks a message and finds the channels that it is for.
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
		return nil, nil, fmt.Errorf("publish %d bytes on channel %d of module %d: at most %d are taken: %w",
			len(payload), key.FD, key.Module, r.opts.MaxPayload, errdefs.ErrInvalidArgument)
	}
	return c, r.table.match(few, c.topic), nil
}

// FromBroker delivers a message of the broker to the channels that it is for.
func (r *Router) FromBroker(topic string, payload []byte) { r.from(topic, payload, false) }

// RetainedFromBroker delivers a message that the broker has sent because of a subscription, to those channels that have not
// had it: subscriptions are shared, and renewed.
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
