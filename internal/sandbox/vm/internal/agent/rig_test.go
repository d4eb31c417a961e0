package agent_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/vm/guestagent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
)

const patience = 60 * time.Second

func deadline(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// port is a fake of QEMU with a virtio-serial port: a socket that serves one client at a time, and a guest's end that
// outlives clients. Like the real port, it drops data if the client leaves, a guest's read returns io.EOF while no
// client is connected, and a guest's write waits for a client.
type port struct {
	listener *net.UnixListener

	mu     sync.Mutex
	host   net.Conn
	closed bool
	change *sync.Cond
}

func newPort(t *testing.T) (*port, string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "agent")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "agent.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	p := &port{listener: l}
	p.change = sync.NewCond(&p.mu)
	go p.accept()
	t.Cleanup(func() {
		p.close()
		os.RemoveAll(dir)
	})
	return p, path
}

func (p *port) accept() {
	for {
		c, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.mu.Lock()
		for p.host != nil && !p.closed {
			p.change.Wait()
		}
		p.host = c
		p.change.Broadcast()
		p.mu.Unlock()
	}
}

func (p *port) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	p.listener.Close()
	if p.host != nil {
		p.host.Close()
	}
	p.change.Broadcast()
}

// wait waits for a client.
func (p *port) wait() (net.Conn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.host == nil && !p.closed {
		p.change.Wait()
	}
	if p.closed {
		return nil, net.ErrClosed
	}
	return p.host, nil
}

func (p *port) gone(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.host == c {
		c.Close()
		p.host = nil
		p.change.Broadcast()
	}
}

func (p *port) Read(b []byte) (int, error) {
	p.mu.Lock()
	c, closed := p.host, p.closed
	p.mu.Unlock()
	if closed {
		return 0, net.ErrClosed
	}
	if c == nil {
		return 0, io.EOF
	}
	n, err := c.Read(b)
	if err != nil {
		p.gone(c)
		return n, io.EOF
	}
	return n, nil
}

func (p *port) Write(b []byte) (int, error) {
	c, err := p.wait()
	if err != nil {
		return 0, err
	}
	if _, err := c.Write(b); err != nil && errors.Is(err, os.ErrDeadlineExceeded) {
		return 0, err
	}
	return len(b), nil // even if the data is lost
}

// guestIn runs the guest's program on the port until the port is closed.
func guestIn(t *testing.T, p *port) {
	t.Helper()
	var running sync.WaitGroup
	running.Go(func() {
		if err := guestagent.Serve(p, "test", nil); !errors.Is(err, net.ErrClosed) {
			t.Errorf("guestagent.Serve error = %v, want net.ErrClosed", err)
		}
	})
	t.Cleanup(func() { p.close(); running.Wait() })
}

// connected starts a guest and returns an Agent connected to it.
func connected(t *testing.T) (*agent.Agent, *port) {
	t.Helper()
	p, path := newPort(t)
	guestIn(t, p)
	return open(t, path), p
}

func open(t *testing.T, path string) *agent.Agent {
	t.Helper()
	a := agent.Open(path, quiet())
	t.Cleanup(func() { a.Close() })
	if err := a.Wait(deadline(t)); err != nil {
		t.Fatal(err)
	}
	return a
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }
