package router

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
)

// ServeConfig says where a Router listens.
type ServeConfig struct {
	// Address takes HTTP/3 (UDP) and HTTP/2 and HTTP/1.1 over TLS (TCP) on one port number, host:port; empty: none.
	Address string
	// Cleartext takes h2c and HTTP/1.1; empty: none.
	Cleartext string
	// Certificate and Key are PEM files with what Address shows; empty: a certificate is generated at each start. ClientCA is one
	// with the authorities of clients' certificates, which clients then need.
	Certificate, Key, ClientCA string
	// TLS is used instead of these files.
	TLS *dataplane.TLS
	// Group counts the connections, which Connections bounds; nil: a group of its own.
	Group       *connlimit.Group
	Connections connlimit.Config
	Logger      *slog.Logger
}

// drainTime is how long requests through the router may take to finish once it is closed.
const drainTime = 5 * time.Second

// Open makes a Router and serves it on its addresses, with a certificate that follows its files, until the returned function
// is called.
func Open(ctx context.Context, rc Config, c ServeConfig) (stop func(), err error) {
	identity, follow, err := identify(c)
	if err != nil {
		return nil, err
	}
	r := New(rc)
	c.TLS = identity
	server, err := Serve(ctx, r, c)
	if err != nil {
		return nil, err
	}
	following, unfollow := context.WithCancel(context.Background())
	go follow(following)
	c.Logger.Info("requests for components are routed", "address", c.Address, "cleartext", c.Cleartext)
	return func() {
		unfollow()
		defer r.Close()
		ctx, cancel := context.WithTimeout(context.Background(), drainTime)
		defer cancel()
		if err := server.Shutdown(ctx); err != nil {
			c.Logger.Warn("requests under way are cut off", "err", err)
		}
	}, nil
}

// Serve opens the addresses and serves r on them. Shut the Server down to end it.
func Serve(ctx context.Context, r *Router, c ServeConfig) (*dataplane.Server, error) {
	server, err := dataplane.NewServer(dataplane.Config{Handler: r, TLS: c.TLS, Name: "route", Group: c.Group, Connections: c.Connections, Logger: c.Logger})
	if err != nil {
		return nil, err
	}
	sockets, err := listen(ctx, c)
	if err != nil {
		return nil, err
	}
	if err := server.Start(sockets); err != nil {
		closeAll(sockets)
		return nil, err
	}
	return server, nil
}

func listen(ctx context.Context, c ServeConfig) (sockets dataplane.Sockets, err error) {
	defer func() {
		if err != nil {
			closeAll(sockets)
			err = fmt.Errorf("router: %w", err)
		}
	}()
	var l net.ListenConfig
	if c.Address != "" {
		if sockets.TLS, err = l.Listen(ctx, "tcp", c.Address); err != nil {
			return sockets, err
		}
		bound := sockets.TLS.Addr().(*net.TCPAddr) // port 0 has become one
		var conn net.PacketConn
		if conn, err = l.ListenPacket(ctx, "udp", bound.String()); err != nil {
			return sockets, err
		}
		sockets.QUIC = conn.(*net.UDPConn)
	}
	if c.Cleartext != "" {
		sockets.Cleartext, err = l.Listen(ctx, "tcp", c.Cleartext)
	}
	return sockets, err
}

func closeAll(s dataplane.Sockets) {
	if s.TLS != nil {
		s.TLS.Close()
	}
	if s.QUIC != nil {
		s.QUIC.Close()
	}
	if s.Cleartext != nil {
		s.Cleartext.Close()
	}
}
