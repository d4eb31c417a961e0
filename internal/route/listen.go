package route

import (
	"context"
	"fmt"
	"log/slog"
	"net"

	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/wasm/dataplane"
)

// ServeConfig says where a Router takes requests.
type ServeConfig struct {
	// Address takes HTTP/3 (UDP) and HTTP/2 and HTTP/1.1 over TLS (TCP) on one port number, host:port; empty: none.
	Address string
	// Cleartext takes h2c and HTTP/1.1; empty: none.
	Cleartext string
	// TLS is for Address.
	TLS *dataplane.TLS
	// Group counts the connections, which Connections bounds; nil: a group of its own.
	Group       *connlimit.Group
	Connections connlimit.Config
	Logger      *slog.Logger
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
