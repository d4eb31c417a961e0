package stream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/fdpass"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// Descriptors that a carrier inherits.
const (
	carrierListener = 3 + iota // the TCP listener of the streaming address
	carrierControl             // the listener of the control socket
	carrierReady               // a pipe; the carrier writes a byte when it serves
)

// carrierPoll is how often a carrier checks whether it is idle.
const carrierPoll = time.Second

// carrierConfig is the argument of a carrier's command line. A daemon with another configuration, or another build,
// replaces the carrier, so the fields are not versioned.
type carrierConfig struct {
	Tickets     string           `json:"tickets"`
	Idle        time.Duration    `json:"idle"`
	Connections connlimit.Config `json:"connections"`
}

// Carriage is what a carrier needs besides its argument.
type Carriage struct {
	// Servers serve the sessions, by handler.
	Servers map[string]sandbox.SessionServer
	// Dial connects to an address from inside a network namespace, for the pods whose server is no SessionDialer.
	Dial   func(ctx context.Context, netns, network, address string) (net.Conn, error)
	Logger *slog.Logger
}

// Carry is the whole program of a carrier, the process that serves sessions so that they outlive the daemon. It
// inherits its descriptors from a Dispatcher, which also wrote the argument. It returns when ctx ends, when it has had
// no session for a while, or, once a daemon has asked it to drain, when its last session has ended.
func Carry(ctx context.Context, argument string, with Carriage) error {
	var config carrierConfig
	if err := json.Unmarshal([]byte(argument), &config); err != nil {
		return fmt.Errorf("a session carrier is started by the daemon only: %w", err)
	}
	listener, control, err := inherit()
	if err != nil {
		return fmt.Errorf("a session carrier is started by the daemon only: %w", err)
	}
	connections := connlimit.NewGroup(with.Logger).Limiter("streaming", config.Connections)
	c := &carrier{config: config, with: with, listener: listener, connections: connections}
	c.server = newServer(Config{
		Logger: with.Logger, IdleTimeout: DefaultIdleTimeout, CreationTimeout: DefaultCreationTimeout, TokenTTL: DefaultTokenTTL,
		Connections: connections,
	}, listener, c.redeem)
	c.control = fdpass.NewServer(control, c.answer, with.Logger)
	defer c.control.Close()
	go func() { _ = c.control.Serve() }()
	serving, served := context.WithCancel(ctx)
	defer served()
	go c.endWhenIdle(serving)
	ready := os.NewFile(carrierReady, "ready")
	_, err = ready.Write([]byte{'\n'})
	_ = ready.Close()
	if err != nil {
		return fmt.Errorf("the daemon that started this session carrier is gone: %w", err)
	}
	return c.server.Serve(ctx)
}

// inherit returns the listeners that the daemon has passed.
func inherit() (*net.TCPListener, *net.UnixListener, error) {
	var listeners [2]net.Listener
	for i, fd := range []uintptr{carrierListener, carrierControl} {
		file := os.NewFile(fd, "inherited listener")
		var err error
		listeners[i], err = net.FileListener(file)
		_ = file.Close()
		if err != nil {
			return nil, nil, err
		}
	}
	tcp, ok1 := listeners[0].(*net.TCPListener)
	control, ok2 := listeners[1].(*net.UnixListener)
	if !ok1 || !ok2 {
		return nil, nil, errors.New("the inherited descriptors are not the expected listeners")
	}
	control.SetUnlinkOnClose(false)
	return tcp, control, nil
}

type carrier struct {
	config      carrierConfig
	with        Carriage
	listener    *net.TCPListener
	connections *connlimit.Limiter
	server      *Server
	control     *fdpass.Server
}

// redeem is the server's redeemer.
func (c *carrier) redeem(kind, token string) (any, Runtime, bool) {
	req, session, ok := ticketDir(c.config.Tickets).redeem(kind, token)
	return req, carried{c.with, session}, ok
}

// endWhenIdle drains the carrier after it has had neither connections nor unused tickets for the configured time. A
// ticket that is issued after the check is not lost: the daemon, which also has the listener, starts another carrier.
func (c *carrier) endWhenIdle(ctx context.Context) {
	tick := time.NewTicker(carrierPoll)
	defer tick.Stop()
	for busy := time.Now(); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		switch {
		case c.server.open.Load() > 0 || c.connections.Stats().Open > 0:
			busy = time.Now()
		case time.Since(busy) >= c.config.Idle && !ticketDir(c.config.Tickets).valid():
			c.with.Logger.Debug("no sessions; the carrier ends")
			c.server.Drain()
			return
		}
	}
}

// Orders that a daemon sends to a carrier. Carriers of earlier builds answer them, so their meaning never changes.
const (
	// orderHello asks who the carrier is. The reply has a copy of its TCP listener.
	orderHello = "hello"
	// orderDrain asks the carrier to accept no more connections, and to end with its last session.
	orderDrain = "drain"
	// orderStats asks for the figures of the carrier's connections.
	orderStats = "stats"
)

type carrierOrder struct {
	Order string `json:"order"`
}

// carrierHello is the reply to orderHello.
type carrierHello struct {
	PID      int   `json:"pid"`
	Sessions int64 `json:"sessions"`
}

// answer carries out an order. It is an fdpass.Handler.
func (c *carrier) answer(_ context.Context, peer fdpass.Peer, request []byte) (fdpass.Reply, error) {
	if peer.UID != 0 && peer.UID != os.Geteuid() {
		return fdpass.Reply{}, fmt.Errorf("user %d may not give orders to the session carrier: %w", peer.UID, errdefs.ErrPermissionDenied)
	}
	var order carrierOrder
	if err := json.Unmarshal(request, &order); err != nil {
		return fdpass.Reply{}, invalid("order: %v", err)
	}
	switch order.Order {
	case orderHello:
		file, err := c.listener.File()
		if err != nil {
			return fdpass.Reply{}, err
		}
		return fdpass.Reply{Body: carrierHello{os.Getpid(), c.server.open.Load()}, Files: []*os.File{file}}, nil
	case orderDrain:
		c.server.Drain()
		return fdpass.Reply{Body: carrierHello{os.Getpid(), c.server.open.Load()}}, nil
	case orderStats:
		return fdpass.Reply{Body: c.connections.Stats()}, nil
	}
	return fdpass.Reply{}, invalid("order %q is unknown", order.Order)
}

// carried is the Runtime of one session in a carrier. It ignores the IDs of its arguments, because the session's plan
// says where it leads.
type carried struct {
	with    Carriage
	session sandbox.Session
}

func (c carried) server() (sandbox.SessionServer, error) {
	s := c.with.Servers[c.session.Handler]
	if s == nil {
		return nil, fmt.Errorf("sessions of runtime handler %q outlive no daemon: %w", c.session.Handler, errdefs.ErrNotImplemented)
	}
	return s, nil
}

func (c carried) Exec(ctx context.Context, _ string, req sandbox.ExecRequest) (int32, error) {
	s, err := c.server()
	if err != nil {
		return 0, err
	}
	return s.Exec(ctx, c.session.Plan, req)
}

func (c carried) Attach(ctx context.Context, _ string, req sandbox.AttachRequest) error {
	s, err := c.server()
	if err != nil {
		return err
	}
	attach := func(ctx context.Context, req sandbox.AttachRequest) error { return s.Attach(ctx, c.session.Plan, req) }
	if !c.session.DetachAtEOF {
		return attach(ctx, req)
	}
	return sandbox.AttachUntilEOF(ctx, req, attach)
}

func (c carried) PortForward(ctx context.Context, _ string, port int32, stream io.ReadWriteCloser) error {
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		return c.with.Dial(ctx, c.session.Netns, network, address)
	}
	if d, ok := c.with.Servers[c.session.Handler].(sandbox.SessionDialer); ok {
		dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			return d.Dial(ctx, c.session.Plan, network, address)
		}
	}
	return PortForwardTCP(ctx, dial, port, stream)
}
