package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
)

// Conn is a TCP connection that the guest's agent has opened.
type Conn struct {
	c           *call
	port        uint16
	read, write deadline
	readMu      sync.Mutex // wire allows one reader and one writer at a time
	writeMu     sync.Mutex
	closeWrite  sync.Once
}

var _ net.Conn = (*Conn)(nil)

// DialTCP connects to a port of the guest's localhost, at 127.0.0.1 or, if that fails, at [::1]. It returns a *Conn, or
// errdefs.ErrUnavailable if the guest cannot connect. The connection does not end when ctx ends.
func (a *Agent) DialTCP(ctx context.Context, port uint16) (net.Conn, error) {
	if port == 0 {
		return nil, fmt.Errorf("connect to port 0 in the guest: not a port: %w", errdefs.ErrInvalidArgument)
	}
	c, err := a.open(ctx, wire.OpDial, wire.Dial{Port: port}.Append(nil))
	if err != nil {
		return nil, fmt.Errorf("connect to port %d in the guest: %w", port, err)
	}
	select {
	case <-c.Writable(wire.ChannelIn):
		return &Conn{c: c, port: port, read: makeDeadline(), write: makeDeadline()}, nil
	case <-c.Done():
		err = c.wait(ctx)
		if err == nil { // the connection was made, but has already ended
			err = c.ended(ctx)
		}
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	c.stop()
	return nil, fmt.Errorf("connect to port %d in the guest: %w", port, err)
}

func (c *Conn) Read(p []byte) (int, error) {
	c.readMu.Lock()
	defer c.readMu.Unlock()
	expired := c.read.wait()
	select {
	case <-expired:
		return 0, os.ErrDeadlineExceeded
	default:
	}
	n, err := c.c.Read(wire.ChannelOut, p, expired)
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		select {
		case <-c.c.answered:
			if failure := c.c.failure(); failure != nil {
				err = failure // the connection was reset, not closed
			}
		default:
		}
	}
	return n, err
}

func (c *Conn) Write(p []byte) (int, error) {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	expired := c.write.wait()
	select {
	case <-expired:
		return 0, os.ErrDeadlineExceeded
	default:
	}
	n, err := c.c.Stream.Write(wire.ChannelIn, p, expired)
	if errors.Is(err, wire.ErrEnded) {
		err = net.ErrClosed
	}
	return n, err
}

// CloseWrite shuts down the writing side of the connection, like net.TCPConn.CloseWrite.
func (c *Conn) CloseWrite() error {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	c.closeWrite.Do(func() { c.c.Stream.Close(wire.ChannelIn) })
	return nil
}

func (c *Conn) Close() error {
	c.c.stop()
	return nil
}

func (c *Conn) LocalAddr() net.Addr { return guestAddr("tripod-agent") }

func (c *Conn) RemoteAddr() net.Addr {
	return guestAddr(net.JoinHostPort("localhost", strconv.Itoa(int(c.port))))
}

func (c *Conn) SetDeadline(t time.Time) error {
	c.read.set(t)
	c.write.set(t)
	return nil
}

func (c *Conn) SetReadDeadline(t time.Time) error {
	c.read.set(t)
	return nil
}

func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.write.set(t)
	return nil
}

// guestAddr is an address in the guest.
type guestAddr string

func (guestAddr) Network() string  { return "tcp" }
func (a guestAddr) String() string { return string(a) }

// deadline is a Conn's read or write deadline. The channel expired is closed at that time.
type deadline struct {
	mu      *sync.Mutex
	timer   *time.Timer
	expired chan struct{}
}

func makeDeadline() deadline { return deadline{mu: &sync.Mutex{}, expired: make(chan struct{})} }

func (d *deadline) wait() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.expired
}

func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil && !d.timer.Stop() {
		<-d.expired // the timer's function has run, or is about to
	}
	d.timer = nil
	select {
	case <-d.expired:
		d.expired = make(chan struct{})
	default:
	}
	if t.IsZero() {
		return
	}
	if left := time.Until(t); left > 0 {
		expired := d.expired
		d.timer = time.AfterFunc(left, func() { close(expired) })
		return
	}
	close(d.expired)
}
