package mqtt

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/packet"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/loglimit"
)

var errClosed = fmt.Errorf("mqtt: the client is closed: %w", errdefs.ErrFailedPrecondition)

// takenOver is the number of connections in a row that a broker ends early, without a reason, after which another client
// with the same ClientID is the likely cause.
const takenOver = 2

// errTakenOver is the end of a connection whose session another client has taken over (MQTT 5.0 §4.13). With MQTT 3.1.1, and
// in mosquitto 2.0.11, such a connection ends without a reason.
var errTakenOver = fmt.Errorf("mqtt: another client with this client identifier has connected: %w", errdefs.ErrUnavailable)

// early is the age below which a lost connection counts as refused. The delay before the next attempt then continues to
// grow, and the oldest message in flight is suspected to be the cause (maxTries).
const early = 5 * time.Second

// client implements Client for both protocol versions.
type client struct {
	cfg    Config
	out    *outbox
	in     *inbox
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	done   chan struct{} // closed when run has ended
	idle   chan struct{} // closed when dispatch has ended
	onConn sync.Mutex    // held while OnConnect runs

	mu           sync.Mutex
	link         *link         // nil while not connected
	connectedCh  chan struct{} // closed while ready is set
	ready        bool          // the subscriptions are renewed
	subs         map[string]subscription
	unsubscribed map[string]struct{} // filters that the broker's session may still have
	qos2         map[uint16]bool     // by identifier, the messages received with QoS 2 that are not released; true if handled
	epoch        uint64              // number of the broker's session; increases when the broker has lost the session
	last         error               // of the last attempt to connect; nil if it succeeded

	connects, sent, lost atomic.Uint64
	losses               loglimit.Limiter[loss] // of the log lines about dropped messages
}

type subscription struct {
	qos  byte
	opts SubscribeOptions
}

// New makes a client that connects in the background; an unavailable broker is not an error. It returns
// errdefs.ErrInvalidArgument for a configuration that cannot work.
func New(cfg Config) (Client, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	c := &client{
		cfg: cfg, losses: loglimit.Limiter[loss]{Every: lossInterval},
		done: make(chan struct{}), idle: make(chan struct{}), connectedCh: make(chan struct{}),
		subs: map[string]subscription{}, unsubscribed: map[string]struct{}{}, qos2: map[uint16]bool{},
	}
	c.out = newOutbox(cfg.QueueMessages, cfg.QueueBytes, cfg.QueueTTL, c.reportLoss)
	c.in = newInbox(cfg.InboxMessages, cfg.InboxBytes, c.reportLoss)
	c.ctx, c.cancel = context.WithCancel(context.Background())
	go c.run()
	go c.dispatch()
	return c, nil
}

// run connects and serves until Close.
func (c *client) run() {
	defer close(c.done)
	short := 0 // connections in a row that the broker has ended early
	for attempt := 0; c.ctx.Err() == nil; attempt++ {
		l, err := dial(c.ctx, c.cfg)
		c.mu.Lock()
		c.last = err
		c.mu.Unlock()
		if err == nil {
			err = c.serve(l)
			if short++; time.Since(l.since) > early {
				attempt, short = 0, 0
			}
			if c.ctx.Err() == nil {
				c.cfg.Log.Warn("mqtt: connection lost", "broker", c.cfg.URL, "client", c.cfg.ClientID, "err", err)
				if c.cfg.OnDisconnect != nil {
					c.cfg.OnDisconnect(err)
				}
				if c.cfg.OnTakenOver != nil && (errors.Is(err, errTakenOver) || errors.Is(err, io.EOF) && short >= takenOver) {
					c.cfg.OnTakenOver(c.ctx)
					short = 0
				}
			}
		} else if c.ctx.Err() == nil && (attempt == 0 || attempt == 5 || attempt%100 == 0) { // log only some of the attempts
			c.cfg.Log.Warn("mqtt: cannot connect; retrying", "broker", c.cfg.URL, "client", c.cfg.ClientID, "attempt", attempt+1, "err", err)
		}
		select {
		case <-time.After(c.backoff(attempt)):
		case <-c.ctx.Done():
		}
	}
}

// backoff returns the delay before the next attempt. The delay doubles with each attempt. A jitter of up to half the
// delay is subtracted, so that many clients do not reconnect at the same time.
func (c *client) backoff(attempt int) time.Duration {
	d := c.cfg.BackoffMax
	if attempt < 16 {
		d = min(d, c.cfg.BackoffMin<<attempt)
	}
	return d/2 + time.Duration(rand.Int64N(int64(d/2)+1))
}

// serve serves one connection until it ends, and returns the reason.
func (c *client) serve(l *link) error {
	c.connects.Add(1)
	var workers sync.WaitGroup
	workers.Go(guard.Func(c.cfg.Log, "MQTT connection", l.write))
	workers.Go(guard.Func(c.cfg.Log, "MQTT connection", l.ping))
	resend := c.attach(l)
	workers.Go(func() { l.read(func(p packet.Packet) error { return c.handle(l, p) }) })
	workers.Go(func() { c.startUp(l, resend) })
	select {
	case <-l.done:
	case <-c.ctx.Done():
		l.disconnect()
	}
	workers.Wait()
	c.detach(l)
	return l.cause()
}

// attach makes l the current link, and returns the messages in flight, which must be sent again first.
func (c *client) attach(l *link) []item {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.link = l
	if !l.resumed {
		c.epoch++
		clear(c.qos2)
		clear(c.unsubscribed)
	}
	return c.out.resume(l.resumed)
}

func (c *client) detach(l *link) {
	c.mu.Lock()
	c.link = nil
	if c.ready {
		c.ready, c.connectedCh = false, make(chan struct{})
	}
	c.mu.Unlock()
	if it := c.out.disconnected(time.Since(l.since) < early); it != nil {
		c.cfg.Log.Error("mqtt: message dropped: it was in flight at each of the last disconnects", "topic", it.topic, "bytes", len(it.payload),
			"times", it.tries)
	}
}

// startUp sends the messages in flight again, renews the subscriptions, calls OnConnect, and then sends the queue.
func (c *client) startUp(l *link, resend []item) {
	for i := range resend {
		if err := l.send(c.packet(l, &resend[i], true)); err != nil {
			return
		}
	}
	if err := c.resubscribe(l); err != nil {
		l.fail(err)
		return
	}
	c.mu.Lock()
	c.ready = true
	close(c.connectedCh)
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
	case <-l.done: // the connection ended while the previous call was running
	default:
		c.cfg.OnConnect(ctx, l.resumed)
	}
}

// drain sends queued messages within the broker's window.
func (c *client) drain(l *link) {
	for {
		for it := c.out.next(l.window); it != nil; it = c.out.next(l.window) {
			if l.maxPacket > 0 && it.size()+packetOverhead > int64(l.maxPacket) {
				c.out.done(it.id, packet.TooLarge)
				c.cfg.Log.Error("mqtt: message dropped: larger than the broker's limit", "topic", it.topic, "bytes", it.size(), "limit", l.maxPacket)
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

// packet returns the packet to send for a message in flight: PUBLISH, or PUBREL once the broker has the message.
func (c *client) packet(l *link, it *item, dup bool) packet.Packet {
	if it.released {
		return &packet.Ack{Type: packet.PUBREL, ID: it.id}
	}
	return &packet.Publish{QoS: max(min(it.qos, l.maxQoS), 1), Retain: it.retain, Dup: dup, Topic: it.topic, Payload: it.payload, ID: it.id}
}

// dispatch passes messages to the Handler, one at a time.
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

// Close implements Client. Messages that the Handler has processed are acknowledged before the DISCONNECT; the broker
// keeps the others.
func (c *client) Close(ctx context.Context) (err error) {
	c.in.close()
	select {
	case <-c.idle:
	case <-ctx.Done():
		err = fmt.Errorf("mqtt: the handler is still running: %w", ctx.Err())
	}
	c.out.flush(ctx)
	c.out.close()
	c.cancel()
	<-c.done // bounded by the timeouts of connecting and of DISCONNECT
	return err
}

func (c *client) Connected() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ready
}

func (c *client) WaitConnected(ctx context.Context) error {
	c.mu.Lock()
	connected := c.connectedCh
	c.mu.Unlock()
	select {
	case <-connected:
		return nil
	case <-c.ctx.Done():
		return errClosed
	case <-ctx.Done():
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.last != nil { // this error names the broker already
			return fmt.Errorf("%w (%w)", c.last, ctx.Err())
		}
		return fmt.Errorf("mqtt: no connection to %s: %w", c.cfg.URL, ctx.Err())
	}
}

func (c *client) Stats() Stats {
	var s Stats
	var dropped uint64
	s.Queued, s.Published, s.Dropped = c.out.stats()
	s.Inbox, s.Received, dropped = c.in.stats()
	s.Published += c.sent.Load()
	s.Connects, s.Lost = c.connects.Load(), c.lost.Load()+dropped
	return s
}

// current returns the current link, or nil while the client is not connected.
func (c *client) current() *link {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.link
}
