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

// Listener wraps ln in a listener that accepts only connections that the Limiter admits.
func (l *Limiter) Listener(ln net.Listener) net.Listener { return &listener{ln, l} }

type listener struct {
	net.Listener
	limiter *Limiter
}

// Accept implements net.Listener. It resets refused connections, so that they leave no state in the kernel.
func (l *listener) Accept() (net.Conn, error) {
	for {
		for wait := l.limiter.acceptDelay(); wait > 0; wait = l.limiter.acceptDelay() {
			time.Sleep(wait) // pacing: meanwhile, new connections wait in the kernel
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
		_ = tcp.SetLinger(0) // fails if the connection is already closed
	}
	conn.Close()
}

// limitedConn is a connection whose Close calls Conn.Leave.
type limitedConn struct {
	net.Conn
	entry *Conn
}

// Read implements net.Conn. If the first request takes too long, Read counts the connection as expired.
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

// CloseWrite calls the underlying connection's CloseWrite.
func (c *limitedConn) CloseWrite() error {
	half, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	return half.CloseWrite()
}

// SyscallConn calls the underlying connection's SyscallConn.
func (c *limitedConn) SyscallConn() (syscall.RawConn, error) {
	raw, ok := c.Conn.(syscall.Conn)
	if !ok {
		return nil, errors.ErrUnsupported
	}
	return raw.SyscallConn()
}

// NetConn returns the underlying connection, like the method of tls.Conn.
func (c *limitedConn) NetConn() net.Conn { return c.Conn }

// Of returns the Conn of a connection from a Listener, or nil for other connections. It unwraps connections that have a
// NetConn method, such as tls.Conn.
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

// WithConn returns a context that carries c for Handler.
func WithConn(ctx context.Context, c *Conn) context.Context {
	return context.WithValue(ctx, contextKey{}, c)
}

// HTTPServer returns a server that serves h on connections from Listener, with the timeouts and size limit of the
// Config.
func (l *Limiter) HTTPServer(h http.Handler) *http.Server {
	return &http.Server{
		Handler:           Handler(h),
		ConnContext:       func(ctx context.Context, c net.Conn) context.Context { return WithConn(ctx, Of(c)) },
		ReadHeaderTimeout: l.HeaderTimeout,
		IdleTimeout:       l.IdleTimeout,
		MaxHeaderBytes:    l.MaxHeaderBytes,
	}
}

// Handler calls Conn.Begin and Conn.End around each request, for the Conn in the request's context.
func Handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, _ := r.Context().Value(contextKey{}).(*Conn)
		c.Begin()
		defer c.End()
		h.ServeHTTP(w, r)
	})
}
