package broker

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/containerd/errdefs"
	mochi "github.com/mochi-mqtt/server/v2"
	"github.com/mochi-mqtt/server/v2/packets"

	"github.com/tripod-run/tripod/internal/tlsfile"
)

// receiveMaximum bounds the unacknowledged messages with QoS 1 and 2 from one client.
const receiveMaximum = 1024

// embedded is the broker in this process.
type embedded struct {
	server    *mochi.Server
	hooks     *hooks
	store     *store
	url       string
	addresses []string
	closed    sync.Once
	closeErr  error
	done      chan struct{}
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
	b := &embedded{store: st, done: make(chan struct{})}
	if err := b.start(cfg, who); err != nil {
		return nil, errors.Join(err, st.close())
	}
	return b, nil
}

func (b *embedded) start(cfg Config, who *users) error {
	caps := mochi.NewDefaultServerCapabilities()
	caps.MaximumClients = int64(cfg.MaxClients)
	caps.MaximumMessageExpiryInterval = 0 // only the message's own expiry applies; with mochi's default, retained messages expire after a day
	caps.MaximumSessionExpiryInterval = uint32(cfg.SessionExpiry.Seconds())
	caps.MaximumPacketSize = uint32(cfg.MaxPacket)
	caps.MaximumInflight = uint16(cfg.MaxQueued)
	caps.ReceiveMaximum = receiveMaximum
	caps.MaximumClientWritesPending = int32(cfg.MaxQueued)
	b.server = mochi.New(&mochi.Options{
		Capabilities: caps, Logger: quiet(cfg.Log), SysTopicResendInterval: 10,
		ClientNetReadBufferSize: 16 << 10,
		// This size makes mochi write each packet immediately. Otherwise mochi would gather packets while messages
		// wait. All these packets would then wait behind our gate, even the PUBREL that the client needs before it can
		// send its next acknowledgement.
		ClientNetWriteBufferSize: 1,
	})
	b.hooks = &hooks{server: b.server, users: who, store: b.store, limit: caps.MaximumPacketSize, queued: cfg.MaxQueued, bytes: cfg.MaxQueuedBytes, stored: map[string]*queueSizes{}, received: map[string]map[uint16]struct{}{}}
	b.hooks.seq.Store(firstNumber)
	if err := b.server.AddHook(b.hooks, nil); err != nil {
		return fmt.Errorf("broker: %w", err)
	}
	var open []net.Listener
	err := b.listen(cfg, &open)
	if err == nil {
		if err = b.server.Serve(); err != nil {
			err = fmt.Errorf("broker: %w", err)
		}
	}
	if err != nil {
		for _, l := range open {
			l.Close()
		}
	}
	return err
}

// listen opens the configured addresses and adds them to the server.
func (b *embedded) listen(cfg Config, open *[]net.Listener) error {
	add := func(id, scheme, address string, wrap func(net.Listener) net.Listener) error {
		l, err := net.Listen("tcp", address)
		if err != nil {
			return fmt.Errorf("broker: %w", err)
		}
		*open = append(*open, l)
		b.addresses = append(b.addresses, l.Addr().String())
		if b.url == "" {
			b.url = scheme + "://" + reachable(l.Addr())
		}
		door := &listener{Listener: wrap(cfg.Connections.Listener(l)), id: id, store: b.store, timeout: cfg.WriteTimeout, connectTimeout: cfg.Connections.HeaderTimeout, log: cfg.Log, end: b.disconnect, abandon: b.abandon, clients: &b.server.Listeners.ClientsWg, closed: make(chan struct{}), served: make(chan struct{})}
		if err := b.server.AddListener(door); err != nil {
			return fmt.Errorf("broker: %w", err)
		}
		return nil
	}
	if cfg.Address != "" {
		if err := add("tcp", "mqtt", cfg.Address, func(l net.Listener) net.Listener { return l }); err != nil {
			return err
		}
	}
	if cfg.TLSAddress == "" {
		return nil
	}
	conf, err := tlsfile.Pair{Certificate: cfg.Certificate, Key: cfg.Key}.Server(cfg.ClientCA)
	if err != nil {
		return fmt.Errorf("broker: %w", err)
	}
	return add("tls", "mqtts", cfg.TLSAddress, func(l net.Listener) net.Listener { return tls.NewListener(l, conf) })
}

// reachable returns the address that a client on this machine dials.
func reachable(a net.Addr) string {
	host, port, _ := net.SplitHostPort(a.String())
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port)
}

func (b *embedded) URL() string { return b.url }

func (b *embedded) Addresses() []string { return b.addresses }

func (b *embedded) Stats() Stats {
	info := b.server.Info
	s := Stats{
		Clients:       int(atomic.LoadInt64(&info.ClientsConnected)),
		Subscriptions: int(max(atomic.LoadInt64(&info.Subscriptions), 0)),
		Received:      uint64(atomic.LoadInt64(&info.MessagesReceived)),
		Sent:          uint64(atomic.LoadInt64(&info.MessagesSent)),
		Dropped:       uint64(atomic.LoadInt64(&info.MessagesDropped)+atomic.LoadInt64(&info.InflightDropped)) + b.hooks.dropped.Load(),
		Refused:       b.hooks.refused.Load(),
		Denied:        b.hooks.denied.Load(),
		StoreErrors:   b.store.errors.Load(),
	}
	for _, cl := range b.server.Clients.GetAll() {
		s.Sessions++
		s.Inflight += cl.State.Inflight.Len()
	}
	for topic := range b.server.Topics.Retained.GetAll() {
		if !strings.HasPrefix(topic, mochi.SysPrefix) {
			s.Retained++
		}
	}
	return s
}

// disconnect closes all connections in parallel, so a client that does not read does not delay the others.
func (b *embedded) disconnect() {
	var all sync.WaitGroup
	for _, cl := range b.server.Clients.GetAll() {
		if c, ok := cl.Net.Conn.(*conn); ok && !cl.Closed() {
			c.limitWrites()
			all.Go(func() {
				_ = b.server.DisconnectClient(cl, packets.ErrServerShuttingDown) // returns its argument
				<-c.ended
			})
		}
	}
	all.Wait()
}

// abandon is called after a packet from the client has made mochi panic. It ends the client's session, unless the
// session is persistent.
func (b *embedded) abandon(c *conn) {
	for _, cl := range b.server.Clients.GetAll() {
		if cl.Net.Conn == net.Conn(c) && !persistent(cl) {
			b.hooks.OnClientExpired(cl)
			b.server.Clients.Delete(cl.ID)
		}
	}
}

func (b *embedded) Close(ctx context.Context) error {
	b.closed.Do(func() {
		b.hooks.closing.Store(true)
		go func() {
			defer close(b.done)
			// Close the server first, because clients still change their sessions while they disconnect.
			b.closeErr = errors.Join(b.server.Close(), b.store.close())
		}()
	})
	select {
	case <-b.done:
		return b.closeErr
	case <-ctx.Done():
		return fmt.Errorf("broker: clients are still being disconnected: %w", ctx.Err())
	}
}
