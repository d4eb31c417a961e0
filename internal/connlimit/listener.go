package connlimit

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"
)

// Listener gives the connections of ln that the Limiter admits.
func (l *Limiter) Listener(ln net.Listener) net.Listener { return &listener{ln, l} }

type listener struct {
	net.Listener
	limiter *Limiter
}

// Accept implements net.Listener. Connections that are refused or displaced see a reset, so that they leave nothing in the
// kernel.
func (l *listener) Accept() (net.Conn, error) {
	for {
		for wait := l.limiter.acceptDelay(); wait > 0; wait = l.limiter.acceptDelay() {
			time.Sleep(wait) // meanwhile newcomers are the kernel's
		}
		conn, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		entry, err := l.limiter.Admit(conn.RemoteAddr(), func() { abort(conn) })
		if err != nil {
			abort(conn)
			continue
		}
		return &limitedConn{conn, entry}, nil
	}
}

func abort(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // fails when it is closed already
	}
	conn.Close()
}

// limitedConn is a connection that leaves its Limiter when it is closed.
type limitedConn struct {
	net.Conn
	entry *Conn
}

// Read counts connections whose first request takes too long.
func (c *limitedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		c.entry.expired(c.RemoteAddr())
	}
	return n, err
}

// Close implements net.Conn.
func (c *limitedConn) Close() error {
	c.entry.Leave()
	return c.Conn.Close()
}

// CloseWrite is that of *net.TCPConn.
func (c *limitedConn) CloseWrite() error {
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	return half.CloseWrite()
}

// SyscallConn is that of *net.TCPConn.
func (c *limitedConn) SyscallConn() (syscall.RawConn, error) {
	raw, ok := c.Conn.(syscall.Conn)
	if !ok {
		return nil, errors.ErrUnsupported
	}
	return raw.SyscallConn()
}

// NetConn is the connection below, as tls.Conn has it.
func (c *limitedConn) NetConn() net.Conn { return c.Conn }

// Of returns the entry of a connection from a Listener, also through layers that have a method NetConn as tls.Conn has; nil if
// it is another one.
func Of(c net.Conn) *Conn {
	for {
		if limited, ok := c.(*limitedConn); ok {
			return limited.entry
		}
		layer, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		c = layer.NetConn()
	}
}

type contextKey struct{}

// WithConn returns a context that carries the entry of a connection for Handler.
func WithConn(ctx context.Context, c *Conn) context.Context {
	return context.WithValue(ctx, contextKey{}, c)
}

// HTTPServer makes a server of h for connections of a Listener, with the bounds of the Limiter.
func (l *Limiter) HTTPServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler:           Handler(h),
		ConnContext:       func(ctx context.Context, c net.Conn) context.Context { return WithConn(ctx, Of(c)) },
		ReadHeaderTimeout: l.HeaderTimeout,
		IdleTimeout:       l.IdleTimeout,
		MaxHeaderBytes:    l.MaxHeaderBytes,
	}
}

// Handler tells the connection of each request, which is in its context, that it is busy.
func Handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, _ := r.Context().Value(contextKey{}).(*Conn)
		c.Begin()
		defer c.End()
		h.ServeHTTP(w, r)
	})
}
