package requests

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
)

// ServeConfig configures the addresses of a Router.
type ServeConfig struct {
	// Address (host:port) is for HTTP/3 over UDP, and for HTTP/2 and HTTP/1.1 over TLS on the TCP port with the same
	// number; empty for none.
	Address string
	// Cleartext (host:port) is for h2c and HTTP/1.1; empty for none.
	Cleartext string
	// Certificate and Key are the PEM files for Address; if empty, a certificate is generated at each start. ClientCA
	// is a PEM file with the authorities for client certificates; if set, clients need a certificate.
	Certificate, Key, ClientCA string
	// TLS is the configuration that Serve uses. Open sets TLS from Certificate, Key and ClientCA.
	TLS *dataplane.TLS
	// Group counts the connections, and Connections limits them. By default, the router has its own Group.
	Group       *connlimit.Group
	Connections connlimit.Config
	Logger      *slog.Logger
}

// drainTime is how long requests in progress can continue after the router is stopped.
const drainTime = 5 * time.Second

// Open makes a Router and serves it on its addresses until the returned function is called. It reloads the certificate
// when the certificate's files change.
func Open(ctx context.Context, rc Config, c ServeConfig) (stop func(), err error) {
	identity, follow, err := serverTLS(c)
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
	c.Logger.Info("router started", "address", c.Address, "cleartext", c.Cleartext)
	return func() {
		unfollow()
		defer r.Close()
		ctx, cancel := context.WithTimeout(context.Background(), drainTime)
		defer cancel()
		if err := server.Shutdown(ctx); err != nil {
			c.Logger.Warn("requests in progress aborted", "err", err)
		}
	}, nil
}

// Serve listens on the addresses and serves r in the background until the returned Server is shut down.
func Serve(ctx context.Context, r *Router, c ServeConfig) (*dataplane.Server, error) {
	server, err := dataplane.NewServer(dataplane.Config{Handler: r, TLS: c.TLS, Name: "route", Group: c.Group, Connections: c.Connections,
		Logger: c.Logger})
	if err != nil {
		return nil, err
	}
	sockets, err := listen(ctx, c)
	if err != nil {
		return nil, err
	}
	if err := server.Start(sockets); err != nil {
		sockets.Close()
		return nil, err
	}
	return server, nil
}

func listen(ctx context.Context, c ServeConfig) (sockets dataplane.Sockets, err error) {
	defer func() {
		if err != nil {
			sockets.Close()
			err = fmt.Errorf("router: %w", err)
		}
	}()
	var l net.ListenConfig
	if c.Address != "" {
		if sockets.TLS, err = l.Listen(ctx, "tcp", c.Address); err != nil {
			return sockets, err
		}
		bound := sockets.TLS.Addr().(*net.TCPAddr) // has the port that the kernel chose if c.Address has port 0
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
