package mqtt

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/mochi-mqtt/server/v2/packets"

	"github.com/tripod-run/tripod/internal/guard"
)

var errClosed = fmt.Errorf("mqtt: the client is closed: %w", errdefs.ErrFailedPrecondition)

// early is how soon after the connect a connection must be lost to be taken for refused in deed.
const early = 5 * time.Second

// client is the one implementation of Client, for both protocol versions.
type client struct {
	cfg    Config
	out    *outbox
	in     *inbox
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	done   chan struct{} // run has ended
	idle   chan struct{} // the last Handler has returned
	onConn sync.Mutex    // one OnConnect at a time

	mu    sync.Mutex
	link  *link // nil while away
	up    chan struct{}
	ready bool // the subscriptions are made
	subs  map[string]subscription
	gone  map[string]struct{} // filters unsubscribed while away, which the broker may still know
	exact map[uint16]bool     // identifiers of QoS 2 received and not released; true: handled
	epoch uint64              // of the session at the broker; grows when that has forgotten us
	last  error               // of the last attempt to connect

	connects, sent, lost atomic.Uint64
}

type subscription struct {
	qos  byte
	opts SubscribeOptions
}

// New makes a client and lets it connect in the background; that the broker is away is no error. A configuration that cannot
// work is errdefs.ErrInvalidArgument.
func New(cfg Config) (Client, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	c := &client{
		cfg: cfg, out: newOutbox(cfg.QueueMessages, cfg.QueueBytes, cfg.QueueTTL), in: newInbox(cfg.InboxMessages, cfg.InboxBytes),
		done: make(chan struct{}), idle: make(chan struct{}), up: make(chan struct{}),
		subs: map[string]subscription{}, gone: map[string]struct{}{}, exact: map[uint16]bool{},
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	go c.run()
	go c.dispatch()
	return c, nil
}

// run connects, again and again.
func (c *client) run() {
	defer close(c.done)
	for attempt := 0; c.ctx.Err() == nil; attempt++ {
		l, err := dial(c.ctx, c.cfg)
		c.mu.Lock()
		c.last = err
		c.mu.Unlock()
		if err == nil {
			err = c.serve(l)
			if time.Since(l.since) > early {
				attempt = 0
			}
			if c.ctx.Err() == nil {
				c.cfg.Log.Warn("mqtt: connection lost", "broker", c.cfg.URL, "client", c.cfg.ClientID, "err", err)
				if c.cfg.OnDisconnect != nil {
					c.cfg.OnDisconnect(err)
				}
			}
		} else if c.ctx.Err() == nil && (attempt == 0 || attempt == 5 || attempt%100 == 0) { // not the same line for hours
			c.cfg.Log.Warn("mqtt: no connection; trying on", "broker", c.cfg.URL, "client", c.cfg.ClientID, "attempt", attempt+1, "err", err)
		}
		select {
		case <-time.After(c.backoff(attempt)):
		case <-c.ctx.Done():
		}
	}
}

// backoff doubles with each attempt; the jitter of up to a half keeps many clients from coming at once.
func (c *client) backoff(attempt int) time.Duration {
	d := c.cfg.BackoffMax
	if attempt < 16 {
		d = min(d, c.cfg.BackoffMin<<attempt)
	}
	return d/2 + time.Duration(rand.Int64N(int64(d/2)+1))
}

// serve works one connection until it ends, and returns why.
func (c *client) serve(l *link) error {
	c.connects.Add(1)
	var workers sync.WaitGroup
	workers.Go(guard.Func(c.cfg.Log, "MQTT connection", l.write))
	workers.Go(guard.Func(c.cfg.Log, "MQTT connection", l.ping))
	again := c.attach(l)
	workers.Go(func() { l.read(func(pk packets.Packet) error { return c.handle(l, pk) }) })
	workers.Go(func() { c.startUp(l, again) })
	select {
	case <-l.done:
	case <-c.ctx.Done():
		l.disconnect()
	}
	workers.Wait()
	c.detach(l)
	return l.cause()
}

// attach makes a link the current one and returns what is to be sent again first.
func (c *client) attach(l *link) []item {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.link = l
	if !l.resumed {
		c.epoch++
		clear(c.exact)
		clear(c.gone)
	}
	return c.out.resume(l.resumed)
}

func (c *client) detach(l *link) {
	c.mu.Lock()
	c.link = nil
	if c.ready {
		c.ready, c.up = false, make(chan struct{})
	}
	c.mu.Unlock()
	if it := c.out.lost(time.Since(l.since) < early); it != nil {
		c.cfg.Log.Error("mqtt: message dropped: it was in flight at every one of the last disconnects", "topic", it.topic, "bytes", len(it.payload), "times", it.tries)
	}
}

// startUp sends again what was in flight, makes the subscriptions, tells the owner, and goes on with the queue.
func (c *client) startUp(l *link, again []item) {
	for i := range again {
		if err := l.send(c.packet(l, &again[i], true)); err != nil {
			return
		}
	}
	if err := c.resubscribe(l); err != nil {
		l.fail(err)
		return
	}
	c.mu.Lock()
	c.ready = true
	close(c.up)
	c.mu.Unlock()
	c.cfg.Log.Info("mqtt: connected", "broker", c.cfg.URL, "client", c.cfg.ClientID, "protocol", c.cfg.Protocol, "resumed", l.resumed)
	if c.cfg.OnConnect != nil {
		go guard.Func(c.cfg.Log, "MQTT connect", func() { c.connected(l) })()
	}
	c.drain(l)
}

// connected calls OnConnect with a context that ends with the link.
func (c *client) connected(l *link) {
	c.onConn.Lock()
	defer c.onConn.Unlock()
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	go func() {
		select {
		case <-l.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	select {
	case <-l.done: // while the one before still ran
	default:
		c.cfg.OnConnect(ctx, l.resumed)
	}
}

// drain sends what is queued, as far as the broker's window goes.
func (c *client) drain(l *link) {
	for {
		for it := c.out.next(l.window); it != nil; it = c.out.next(l.window) {
			if l.maxPacket > 0 && it.size()+packetOverhead > int64(l.maxPacket) {
				c.out.done(it.id, packets.ErrPacketTooLarge.Code)
				c.cfg.Log.Error("mqtt: message dropped: larger than the broker takes", "topic", it.topic, "bytes", it.size(), "limit", l.maxPacket)
				continue
			}
			if err := l.send(c.packet(l, it, false)); err != nil {
				return
			}
		}
		select {
		case <-c.out.work:
		case <-l.done:
			return
		}
	}
}

// packet makes what is sent for a message in flight.
func (c *client) packet(l *link, it *item, dup bool) packets.Packet {
	if it.released {
		return ack(packets.Pubrel, it.id, 0)
	}
	return packets.Packet{
		FixedHeader: packets.FixedHeader{Type: packets.Publish, Qos: max(min(it.qos, l.maxQoS), 1), Retain: it.retain, Dup: dup},
		TopicName:   it.topic, Payload: it.payload, PacketID: it.id,
	}
}

// dispatch gives the messages to the Handler, one after the other.
func (c *client) dispatch() {
	defer close(c.idle)
	for {
		a, ok := c.in.next()
		if !ok {
			return
		}
		guard.Func(c.cfg.Log, "MQTT message", func() { c.cfg.Handler(a.Message) })()
		if a.ack != nil {
			a.ack()
		}
	}
}

// Close ends the client; see Client. What the Handler has done is acknowledged before the DISCONNECT; what it has not seen, the
// broker keeps.
func (c *client) Close(ctx context.Context) (err error) {
	c.in.close()
	select {
	case <-c.idle:
	case <-ctx.Done():
		err = fmt.Errorf("mqtt: the handler still runs: %w", ctx.Err())
	}
	c.out.flush(ctx)
	c.out.close()
	c.cancel()
	<-c.done // within the connect's or the DISCONNECT's own bound
	return err
}

// Connected tells whether the subscriptions of the current connection are made.
func (c *client) Connected() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ready
}

// WaitConnected waits for that.
func (c *client) WaitConnected(ctx context.Context) error {
	c.mu.Lock()
	up := c.up
	c.mu.Unlock()
	select {
	case <-up:
		return nil
	case <-c.ctx.Done():
		return errClosed
	case <-ctx.Done():
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.last != nil { // says which broker, too
			return fmt.Errorf("%w (%w)", c.last, ctx.Err())
		}
		return fmt.Errorf("mqtt: no connection to %s: %w", c.cfg.URL, ctx.Err())
	}
}

// Stats returns the counters.
func (c *client) Stats() Stats {
	var s Stats
	var loose uint64
	s.Queued, s.Published, s.Dropped = c.out.stats()
	s.Inbox, s.Received, loose = c.in.stats()
	s.Published += c.sent.Load()
	s.Connects, s.Lost = c.connects.Load(), c.lost.Load()+loose
	return s
}

// current returns the link, nil while there is none.
func (c *client) current() *link {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.link
}
