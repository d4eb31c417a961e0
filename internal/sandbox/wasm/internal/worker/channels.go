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

// Bounds of what waits in a pod's channels. Beyond them the oldest messages go.
const (
	maxWaiting      = 1024     // messages that a guest has not read, of a channel
	maxWaitingBytes = 32 << 20 // of all of a pod's channels
)

// channels are the channels of a pod: those that its guest may open, by name, and those that it has open, which are ports.
//
//	guest ──Send──▶ port ──▶ Router ──▶ ports of other pods of this worker     at once
//	                  └────▶ backlog ──▶ link ──▶ daemon                       Publish frames, in order
//	daemon ──▶ link ──▶ port ──Receive──▶ guest
type channels struct {
	id     string
	named  map[string]channel.Channel
	router *channel.Router // between the pods of the worker

	mu      sync.Mutex
	ports   map[int]*port // open, by number
	waiting int           // bytes that guests have not read
	ended   bool          // the pod is being stopped: readers meet the end
	backlog backlog

	lost, overrun atomic.Uint64 // messages for the daemon, and for the guest, that were dropped
}

// newRouter makes what joins the channels of a worker's pods. What goes beyond the worker, each pod tells the daemon.
func newRouter() *channel.Router {
	return channel.NewRouter(channel.RouterOptions{
		Publish: func(string, byte, []byte) {}, Subscribe: func(string, byte) {}, Unsubscribe: func(string) {},
	})
}

// newChannels makes the channels of a pod; nil: it has none.
func newChannels(spec workerapi.PodSpec, router *channel.Router) *channels {
	if len(spec.Channels) == 0 {
		return nil
	}
	c := &channels{id: spec.ID, named: map[string]channel.Channel{}, router: router, ports: map[int]*port{}}
	c.backlog.init()
	for _, ch := range spec.Channels {
		c.named[ch.Name] = ch
	}
	return c
}

// port is a channel that the guest has open.
type port struct {
	of    *channels
	fd    int // its number on the wire
	flags channel.Flags
	topic string
	wake  func()

	// of.mu:
	messages [][]byte // for the guest
	queued   int      // messages in the backlog
	blocked  bool     // the guest waits for room in the backlog
	closed   bool
}

func (p *port) key() channel.Key { return channel.Key{Runtime: p.of.id, FD: p.fd} }

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
		return nil, fmt.Errorf("channel %q: the module was given none of this name: %w", name, errdefs.ErrNotFound)
	case !read && !write:
		return nil, nil
	case read && !flags.CanRead() || write && !flags.CanWrite():
		return nil, fmt.Errorf("channel %q: it is %s: %w", name, flags, errdefs.ErrPermissionDenied)
	}
	if !read {
		flags &^= channel.Read
	}
	if !write {
		flags &^= channel.Write
	}
	p := &port{of: c, flags: flags, topic: ch.Topic, wake: wake}
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

// number gives the port the lowest free number, and tells the daemon of it.
func (c *channels) number(p *port) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for p.fd = 0; c.ports[p.fd] != nil; p.fd++ {
	}
	if p.fd >= channel.MaxChannels {
		return fmt.Errorf("channel on %q: the module has %d channels open, which is the limit: %w", p.topic, channel.MaxChannels, errdefs.ErrResourceExhausted)
	}
	c.ports[p.fd] = p
	c.backlog.work()
	return nil
}

// Close implements engine.Channel.
func (p *port) Close() {
	p.of.mu.Lock()
	closed := p.closed
	if p.closed = true; !closed {
		p.of.drop(p, len(p.messages))
		delete(p.of.ports, p.fd)
		p.of.backlog.work()
		_ = p.of.router.Close(p.key()) // before the number is given to another
	}
	p.of.mu.Unlock()
}

// drop takes messages off a port's queue. c.mu is held.
func (c *channels) drop(p *port, n int) {
	for _, m := range p.messages[:n] {
		c.waiting -= len(m)
	}
	clear(p.messages[:n])
	if p.messages = p.messages[n:]; len(p.messages) == 0 {
		p.messages = nil
	}
}

// deliver gives the port a message, which may be others', too.
func (p *port) deliver(message []byte) {
	c := p.of
	c.mu.Lock()
	if p.closed || !p.flags.CanRead() || c.ended {
		c.mu.Unlock()
		return
	}
	for len(p.messages) > 0 && (len(p.messages) >= maxWaiting || c.waiting+len(message) > maxWaitingBytes) {
		c.drop(p, 1)
		c.overrun.Add(1)
	}
	if c.waiting+len(message) > maxWaitingBytes {
		c.overrun.Add(1)
		c.mu.Unlock()
		return
	}
	first := len(p.messages) == 0
	p.messages = append(p.messages, message)
	c.waiting += len(message)
	c.mu.Unlock()
	if first {
		p.wake()
	}
}

// Receive implements engine.Channel.
func (p *port) Receive() ([]byte, error) {
	c := p.of
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
	c := p.of
	if !c.room(p) {
		return engine.ErrWait
	}
	m := append([]byte(nil), message...) // for all who get it
	if err := c.router.Publish(p.key(), m); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lost.Add(uint64(c.backlog.add(p, m)))
	return nil
}

// room tells whether the port may publish now. If not, it is woken when it may.
func (c *channels) room(p *port) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	p.blocked = c.backlog.busy()
	return !p.blocked
}

// Ready implements engine.Channel.
func (p *port) Ready(write bool) bool {
	if write {
		return p.of.room(p)
	}
	p.of.mu.Lock()
	defer p.of.mu.Unlock()
	return len(p.messages) > 0 || p.of.ended
}

// dropped is how many messages were lost, in either direction.
func (c *channels) dropped() uint64 { return c.lost.Load() + c.overrun.Load() }

// receive takes a message of the daemon.
func (c *channels) receive(fd int, message []byte) {
	c.mu.Lock()
	p := c.ports[fd]
	c.mu.Unlock()
	if p != nil { // else it was closed meanwhile
		p.deliver(message)
	}
}

// stop lets the readers meet the end, after what there is for them.
func (c *channels) stop() {
	c.mu.Lock()
	c.ended = true
	c.mu.Unlock()
	wake(c.openPorts())
}

// openPorts are the ports that are open.
func (c *channels) openPorts() []*port {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Values(c.ports))
}

// close is the end of the pod, whose guest is gone: what is for the daemon is given a moment to get there.
func (c *channels) close() {
	c.stop()
	for _, p := range c.openPorts() {
		p.Close()
	}
	c.flush()
}

// Channels implements workerapi.Handler. The connection stays the caller's when there is an error.
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
