package worker

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// Limits for messages that a guest has not read. Beyond these limits, the oldest messages are dropped.
const (
	maxWaiting      = 1024     // messages per channel
	maxWaitingBytes = 32 << 20 // bytes in all channels of a pod
)

// channels holds a pod's channels: the configured channels, which the guest can open by name, and the open channels
// (ports).
//
//	guest ──Send──▶ port ──▶ Router ──▶ ports of other pods of this worker     immediately
//	                  └────▶ backlog ──▶ link ──▶ daemon                       Publish frames, in order
//	daemon ──▶ link ──▶ port ──Receive──▶ guest
type channels struct {
	id    string
	named map[string]channel.Channel
	// mayKeep is set if a channel has QoS 1 or 2.
	mayKeep bool
	router  *channel.Router // shared by all pods of the worker

	mu      sync.Mutex
	ports   map[int]*port // open ports by number
	waiting int           // bytes that the guest has not read
	ended   bool          // the pod is stopping: readers get end of file
	backlog backlog

	lost, overrun atomic.Uint64 // number of dropped messages to the daemon, and to the guest
	losses        losses
}

// newRouter makes the router between the pods of one worker. Its broker callbacks do nothing, because each pod sends
// its messages to the daemon itself.
func newRouter() *channel.Router {
	return channel.NewRouter(channel.RouterOptions{
		Publish: func(channel.Key, string, byte, []byte, func()) {}, Subscribe: func(string, byte) {}, Unsubscribe: func(string) {},
	})
}

// newChannels makes the channels of a pod, or returns nil if the pod has none.
func newChannels(spec workerapi.PodSpec, router *channel.Router, daemon *presence) *channels {
	if len(spec.Channels) == 0 {
		return nil
	}
	c := &channels{id: spec.ID, named: map[string]channel.Channel{}, router: router, ports: map[int]*port{}}
	c.losses.lines.Every = lossInterval
	c.backlog.daemon, c.backlog.writer, c.backlog.linked = daemon, make(notifier, 1), make(notifier, 1)
	for _, ch := range spec.Channels {
		c.named[ch.Name] = ch
		c.mayKeep = c.mayKeep || ch.Flags.QoS() > 0
	}
	return c
}

// port is a channel that the guest has opened.
type port struct {
	channels *channels
	name     string
	fd       int // channel number in frames to and from the daemon
	flags    channel.Flags
	topic    string
	wake     func()

	// Guarded by channels.mu:
	messages [][]byte // to the guest
	queued   int      // messages in the backlog
	blocked  bool     // the guest waits for room in the backlog
	closed   bool
}

func (p *port) key() channel.Key { return channel.Key{Runtime: p.channels.id, FD: p.fd} }

// Open implements engine.Channels.
func (c *channels) Open(name string, read, write bool, wake func()) (engine.Channel, error) {
	p, err := c.open(name, read, write, wake)
	if p == nil {
		return nil, err
	}
	return p, nil
}

func (c *channels) open(name string, read, write bool, wake func()) (*port, error) {
	ch, ok := c.named[name]
	flags := ch.Flags
	switch {
	case !ok:
		return nil, fmt.Errorf("channel %q: the module has no channel of this name: %w", name, errdefs.ErrNotFound)
	case !read && !write:
		return nil, nil
	case read && !flags.CanRead() || write && !flags.CanWrite():
		return nil, fmt.Errorf("channel %q has mode %s: %w", name, flags, errdefs.ErrPermissionDenied)
	}
	if !read {
		flags &^= channel.Read
	}
	if !write {
		flags &^= channel.Write
	}
	p := &port{channels: c, name: name, flags: flags, topic: ch.Topic, wake: wake}
	if err := c.number(p); err != nil {
		return nil, err
	}
	// The topic was checked when the pod was started.
	if err := c.router.Open(p.key(), channel.Open{FD: p.fd, Flags: flags, Topic: p.topic}, "", p.deliver); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

// number assigns the lowest free number to the port, and wakes the writer to announce the port to the daemon.
func (c *channels) number(p *port) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for p.fd = 0; c.ports[p.fd] != nil; p.fd++ {
	}
	if p.fd >= channel.MaxChannels {
		return fmt.Errorf("channel on %q: the module has %d channels open, which is the limit: %w", p.topic, channel.MaxChannels,
			errdefs.ErrResourceExhausted)
	}
	c.ports[p.fd] = p
	c.backlog.writer.wake()
	return nil
}

// Close implements engine.Channel.
func (p *port) Close() {
	p.channels.mu.Lock()
	closed := p.closed
	if p.closed = true; !closed {
		p.channels.drop(p, len(p.messages))
		delete(p.channels.ports, p.fd)
		p.channels.backlog.writer.wake()
		_ = p.channels.router.Close(p.key()) // under the lock, before another port gets the number
	}
	p.channels.mu.Unlock()
}

// drop removes the first n messages from the port's queue. The caller holds c.mu.
func (c *channels) drop(p *port, n int) {
	for _, m := range p.messages[:n] {
		c.waiting -= len(m)
	}
	clear(p.messages[:n])
	if p.messages = p.messages[n:]; len(p.messages) == 0 {
		p.messages = nil
	}
}

// deliver queues a message for the guest. The message can be shared with other ports.
func (p *port) deliver(message []byte) {
	c := p.channels
	c.mu.Lock()
	if p.closed || !p.flags.CanRead() || c.ended {
		c.mu.Unlock()
		return
	}
	lost := 0
	for len(p.messages) > 0 && (len(p.messages) >= maxWaiting || c.waiting+len(message) > maxWaitingBytes) {
		c.drop(p, 1)
		lost++
	}
	first := len(p.messages) == 0
	if fits := c.waiting+len(message) <= maxWaitingBytes; fits {
		p.messages = append(p.messages, message)
		c.waiting += len(message)
	} else {
		lost++
		first = false
	}
	c.mu.Unlock()
	if first {
		p.wake()
	}
	if lost > 0 {
		c.overrun.Add(uint64(lost))
		c.losses.add(loss{p.name, p.topic, "component"}, lost)
	}
}

// Receive implements engine.Channel.
func (p *port) Receive() ([]byte, error) {
	c := p.channels
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case len(p.messages) > 0:
		m := p.messages[0]
		c.drop(p, 1)
		return m, nil
	case c.ended:
		return nil, io.EOF
	}
	return nil, engine.ErrWait
}

// Send implements engine.Channel.
func (p *port) Send(message []byte) error {
	c := p.channels
	if !c.room(p) {
		return engine.ErrWait
	}
	m := append([]byte(nil), message...) // shared by all receivers
	if err := c.router.Publish(p.key(), m, nil); err != nil {
		return err
	}
	c.mu.Lock()
	lost := c.backlog.add(p, m)
	c.mu.Unlock()
	c.lose(lost)
	return nil
}

// lose counts messages that the daemon does not get. The caller does not hold c.mu, because lose writes to the log.
func (c *channels) lose(all []outgoing) {
	c.lost.Add(uint64(len(all)))
	for _, o := range all {
		c.losses.add(loss{o.port.name, o.port.topic, "daemon"}, 1)
	}
}

// room reports whether the port can publish now. If it cannot, p.wake is called once it can.
func (c *channels) room(p *port) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	p.blocked = c.backlog.busy(p.reliable())
	return !p.blocked
}

// Ready implements engine.Channel.
func (p *port) Ready(write bool) bool {
	if write {
		return p.channels.room(p)
	}
	p.channels.mu.Lock()
	defer p.channels.mu.Unlock()
	return len(p.messages) > 0 || p.channels.ended
}

// dropped returns the number of messages lost in either direction.
func (c *channels) dropped() uint64 { return c.lost.Load() + c.overrun.Load() }

// receive delivers a message from the daemon.
func (c *channels) receive(fd int, message []byte) {
	c.mu.Lock()
	p := c.ports[fd]
	c.mu.Unlock()
	if p != nil { // nil: closed in the meantime
		p.deliver(message)
	}
}

// stop makes readers get end of file after the messages already queued for them.
func (c *channels) stop() {
	c.mu.Lock()
	c.ended = true
	c.mu.Unlock()
	wake(c.openPorts())
}

// openPorts returns a snapshot of the open ports, for use without c.mu.
func (c *channels) openPorts() []*port {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Values(c.ports))
}

// close closes all ports and flushes the backlog to the daemon, for at most flushTimeout. The guest has ended.
func (c *channels) close() {
	c.stop()
	for _, p := range c.openPorts() {
		p.Close()
	}
	c.flush()
}

// Channels implements workerapi.Handler. If it fails, the caller still owns the connection.
func (w *Worker) Channels(_ context.Context, id string, conn net.Conn) error {
	p, err := w.pod(id)
	switch {
	case err != nil:
		return err
	case p.channels == nil:
		return fmt.Errorf("pod %s has no channels: %w", id, errdefs.ErrFailedPrecondition)
	case !p.channels.connect(conn):
		return fmt.Errorf("pod %s has exited: %w", id, errdefs.ErrFailedPrecondition)
	}
	return nil
}

var (
	_ engine.Channels = (*channels)(nil)
	_ engine.Channel  = (*port)(nil)
)
