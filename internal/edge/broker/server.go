package broker

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/time/rate"

	"github.com/tripod-run/tripod/internal/edge/packet"
	"github.com/tripod-run/tripod/internal/loglimit"
	"github.com/tripod-run/tripod/internal/tlsfile"
)

// server is the broker in this process.
type server struct {
	cfg            Config
	log            *slog.Logger
	users          *users
	store          *store
	records        *records
	url            string
	addresses      []string
	listeners      []net.Listener
	parking        *parking
	web            *http.Server // of webListeners
	webListeners   []net.Listener
	connectTimeout time.Duration

	// mu guards everything below up to the counters. Publishers hold it for reading.
	mu            sync.RWMutex
	tree          tree
	sessions      map[string]*session
	wills         map[string]*will // of absent clients
	conns         map[*conn]struct{}
	clients       int // connections with a session
	retainedCount int
	retainedBytes int64
	expiring      int // retained messages that expire
	closing       bool

	subscriptions                            atomic.Int64
	received, sent, dropped, refused, denied atomic.Uint64

	meters   [limitCount]meter
	losses   loglimit.Limiter[loss] // of the log lines about dropped messages
	origins  rate.Sometimes         // for the log
	serving  sync.WaitGroup
	stop     chan struct{}
	closed   sync.Once
	closeErr error
	done     chan struct{}
}

// New starts the embedded broker. When it returns, clients can connect. It returns errdefs.ErrInvalidArgument for a
// configuration that cannot work, and the system's error if an address or the file is in use.
func New(cfg Config) (Broker, error) {
	cfg = cfg.withDefaults()
	if cfg.Address == "" && cfg.TLSAddress == "" {
		return nil, fmt.Errorf("broker: no address and no TLS address: %w", errdefs.ErrInvalidArgument)
	}
	who, err := newUsers(cfg.Users)
	if err != nil {
		return nil, err
	}
	st, err := openStore(cfg.Path, cfg.Log)
	if err != nil {
		return nil, err
	}
	s := &server{
		origins: rated(), losses: loglimit.Limiter[loss]{Every: logInterval}, cfg: cfg, log: cfg.Log, users: who, store: st,
		records: newRecords(st), connectTimeout: cfg.Connections.HeaderTimeout,
		sessions: map[string]*session{}, wills: map[string]*will{}, conns: map[*conn]struct{}{}, stop: make(chan struct{}),
		done: make(chan struct{}),
	}
	for l := range s.meters {
		s.meters[l].log = rated()
	}
	s.web = s.webServer()
	if s.parking, err = newParking(func(c *conn) { go s.serve(c) }); err != nil {
		return nil, errors.Join(err, st.close())
	}
	if err := errors.Join(s.load(), s.listen()); err != nil {
		s.parking.close()
		s.mu.Lock()
		s.closing = true // for the timers of sessions and wills
		s.mu.Unlock()
		for _, l := range slices.Concat(s.listeners, s.webListeners) {
			l.Close()
		}
		return nil, errors.Join(err, st.close())
	}
	for _, l := range s.listeners {
		s.serving.Go(func() { s.accept(l) })
	}
	for _, l := range s.webListeners {
		s.serving.Go(func() { _ = s.web.Serve(l) }) // until Close
	}
	s.serving.Go(s.housekeeping)
	s.serving.Go(s.parking.wait)
	s.serving.Go(func() { s.parking.watch(s.stop) })
	return s, nil
}

// listen opens the configured addresses.
func (s *server) listen() error {
	var secure *tls.Config
	if s.cfg.TLSAddress != "" || s.cfg.WebSocketTLSAddress != "" {
		var err error
		if secure, err = (tlsfile.Pair{Certificate: s.cfg.Certificate, Key: s.cfg.Key}).Server(s.cfg.ClientCA); err != nil {
			return fmt.Errorf("broker: %w", err)
		}
	}
	for _, door := range []struct {
		address, scheme string
		conf            *tls.Config
		to              *[]net.Listener
	}{
		{s.cfg.Address, "mqtt", nil, &s.listeners},
		{s.cfg.TLSAddress, "mqtts", secure, &s.listeners},
		{s.cfg.WebSocketAddress, "ws", nil, &s.webListeners},
		{s.cfg.WebSocketTLSAddress, "wss", secure, &s.webListeners},
	} {
		if door.address == "" {
			continue
		}
		l, err := net.Listen("tcp", door.address)
		if err != nil {
			return fmt.Errorf("broker: %w", err)
		}
		s.addresses = append(s.addresses, l.Addr().String())
		if s.url == "" {
			s.url = door.scheme + "://" + Reachable(l.Addr().String())
		}
		limited := s.cfg.Connections.Listener(l)
		if door.conf != nil {
			limited = tls.NewListener(limited, door.conf)
		}
		*door.to = append(*door.to, limited)
	}
	return nil
}

// Reachable returns the address that a client on this machine dials, for an address that the broker listens on.
func Reachable(address string) string {
	host, port, _ := net.SplitHostPort(address)
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port)
}

// accept accepts connections until the listener is closed, also after errors such as too many open files.
func (s *server) accept(l net.Listener) {
	for {
		n, err := l.Accept()
		switch {
		case err == nil:
			s.begin(n)
		case errors.Is(err, net.ErrClosed):
			return
		default:
			s.log.Error("broker: cannot accept connections", "address", l.Addr().String(), "err", err)
			select {
			case <-time.After(100 * time.Millisecond):
			case <-s.stop:
				return
			}
		}
	}
}

// begin serves a connection, unless the broker is closing.
func (s *server) begin(n net.Conn) {
	c := newConn(n, s)
	s.mu.Lock()
	closing := s.closing
	if !closing {
		s.conns[c] = struct{}{}
		s.serving.Add(1) // until serve has ended the connection, also while it is parked
		go s.serve(c)
	}
	s.mu.Unlock()
	if closing {
		n.Close()
	}
}

// enter gives the connection its session, which it begins or takes over. It reports whether there was one, or why the
// client may not have it.
func (s *server) enter(c *conn, clean bool) (present bool, code packet.Code) {
	var wills []*will
	var previous *conn
	end := s.store.begin()
	s.mu.Lock()
	old := s.sessions[c.id]
	switch {
	case s.closing:
		code = packet.ShuttingDown
	case old != nil && s.users != nil && old.user != c.user:
		s.denied.Add(1)
		s.log.Warn("broker: the session belongs to another user", "client", c.id, "user", c.user, "remote", c.RemoteAddr().String())
		code = packet.ClientIDNotValid
	case s.clients >= s.cfg.MaxClients && (old == nil || !old.online()):
		s.meet(limitClients, c.id)
		code = packet.QuotaExceeded
	case old == nil && c.expires > 0 && len(s.sessions) >= sessionsPerClient*s.cfg.MaxClients:
		s.meet(limitClients, c.id)
		code = packet.QuotaExceeded
	}
	if code.Failed() {
		s.mu.Unlock()
		end()
		return false, code
	}
	if old != nil && !old.outlives() { // it ends with the connection that is taken over
		clean = true
	}
	if w := s.pullWill(c.id); w != nil {
		if w.deferred || old != nil && !clean {
			s.records.deleteWill(w)
		} else { // the session ends (MQTT 5.0 §3.1.3.2.2)
			wills = append(wills, w)
		}
	}
	if old != nil && old.timer != nil {
		old.timer.Stop()
		old.timer = nil
	}
	current := old
	if current == nil || clean {
		current = s.newSession(c.id, c.user)
	}
	if old != nil && clean {
		previous = s.endSession(old)
	}
	if before := current.attach(c); before != nil {
		previous = before
	}
	s.sessions[c.id] = current
	if previous != nil {
		switch w := previous.takeWill(); {
		case w == nil:
		case clean || w.delay == 0:
			wills = append(wills, w)
		default: // the client is back within the delay
			s.records.deleteWill(w)
		}
	}
	present = old != nil && !clean
	s.storeSession(current, c, present)
	c.mu.Lock()
	c.session = current
	c.mu.Unlock()
	s.clients++
	s.mu.Unlock()
	end()
	if previous != nil {
		previous.end(packet.SessionTakenOver)
	}
	s.publishWills(wills)
	return present, packet.Success
}

// storeSession stores the session of a new connection, if it has to outlive the connection. stored reports whether it is
// in the store. server.mu is locked.
func (s *server) storeSession(current *session, c *conn, stored bool) {
	switch {
	case current.persistent():
		s.records.putSession(current)
	case stored:
		s.records.deleteSession(current.id)
	}
	if c.will != nil {
		s.records.putWill(c.will)
	}
}

// leave ends the connection's part in its session.
func (s *server) leave(c *conn) {
	var wills []*will
	end := s.store.begin()
	s.mu.Lock()
	delete(s.conns, c)
	if c.session != nil {
		s.clients--
		if c.session.detach(c) {
			wills = s.absent(c)
		}
	}
	s.mu.Unlock()
	end()
	s.publishWills(wills)
}

// absent handles a session that has lost its connection. server.mu is locked.
func (s *server) absent(c *conn) (wills []*will) {
	current, w := c.session, c.takeWill()
	if s.closing { // not the client's fault; its will is published after the next start, unless it comes back
		if current.persistent() {
			s.records.putSession(current)
		} else {
			s.endSession(current)
		}
		return nil
	}
	switch {
	case w == nil:
	case w.delay > 0 && current.persistent():
		s.delayWill(w, w.delay)
	default:
		wills = append(wills, w)
	}
	if !current.persistent() {
		s.endSession(current)
		return wills
	}
	s.records.putSession(current)
	s.expireSession(current, current.expiry)
	return wills
}

// expireSession ends an absent client's session after a time. server.mu is locked.
func (s *server) expireSession(current *session, after time.Duration) {
	var timer *time.Timer
	timer = time.AfterFunc(after, func() {
		var wills []*will
		end := s.store.begin()
		s.mu.Lock()
		if current.timer == timer && !s.closing {
			if w := s.pullWill(current.id); w != nil {
				wills = append(wills, w)
			}
			s.endSession(current)
		}
		s.mu.Unlock()
		end()
		s.publishWills(wills)
	})
	current.timer = timer
}

// endSession removes a session, and gives its messages to other members of their shared subscriptions (MQTT 5.0 §4.8.2): a
// message with QoS 2 that the client may have goes to nobody else. It returns the session's connection, if there is one.
// server.mu is locked, and the caller is in a group of the store's changes.
func (s *server) endSession(ended *session) (previous *conn) {
	for filter := range ended.subs {
		s.unsubscribe(ended, filter)
		s.records.deleteSubscription(ended.id, filter)
	}
	s.records.deleteSession(ended.id)
	if s.sessions[ended.id] == ended {
		delete(s.sessions, ended.id)
	}
	previous, orphans := ended.clear()
	for _, e := range orphans {
		e.share.publish(e.message)
	}
	return previous
}

// loss says which messages were dropped, and why.
type loss struct{ client, topic, why string }

// Reasons of losses.
const (
	lossQueue  = "messages are dropped, because the client's queue is full (broker.max_queued, broker.max_queued_bytes)"
	lossPacket = "messages are dropped, because they are larger than the client's maximum packet size"
	lossEnd    = "messages are dropped, because the session of an absent client has ended"
)

// drop counts a message that a session had no room for.
func (s *server) drop(of *session, topic string) {
	s.meters[limitQueue].count.Add(1)
	s.lose(loss{of.id, topic, lossQueue})
}

// lose counts a dropped message, and logs it if the limit of the lines allows.
func (s *server) lose(l loss) {
	l.topic = loglimit.Text(l.topic)
	s.dropped.Add(1)
	if n := s.losses.Add(l, 1, time.Now()); n > 0 {
		s.log.Warn("broker: "+l.why, "client", l.client, "topic", l.topic, "messages", n)
	}
}

func (s *server) URL() string { return s.url }

func (s *server) Addresses() []string { return s.addresses }

func (s *server) Stats() Stats {
	s.mu.RLock()
	defer s.mu.RUnlock()
	st := Stats{
		Clients: s.clients, Sessions: len(s.sessions), Subscriptions: int(s.subscriptions.Load()), Retained: s.retainedCount,
		Received: s.received.Load(), Sent: s.sent.Load(), Dropped: s.dropped.Load(), Refused: s.refused.Load(), Denied: s.denied.Load(),
		StoreErrors: s.store.errors.Load(), Limits: s.met(),
	}
	for _, one := range s.sessions {
		n, _ := one.queued()
		st.Inflight += n
	}
	return st
}

func (s *server) Close(ctx context.Context) error {
	s.closed.Do(func() {
		s.mu.Lock()
		s.closing = true
		close(s.stop)
		for c := range s.conns {
			c.end(packet.ShuttingDown)
		}
		for _, w := range s.wills {
			w.timer.Stop()
		}
		s.mu.Unlock()
		go func() {
			defer close(s.done)
			for _, l := range s.listeners {
				l.Close()
			}
			s.web.Close()
			s.parking.close()
			s.serving.Wait() // clients still change their sessions while they disconnect
			s.closeErr = s.store.close()
		}()
	})
	select {
	case <-s.done:
		return s.closeErr
	case <-ctx.Done():
		return fmt.Errorf("broker: clients are still being disconnected: %w", ctx.Err())
	}
}
