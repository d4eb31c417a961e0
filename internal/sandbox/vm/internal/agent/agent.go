package agent

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

const (
	// The pause between attempts to connect doubles from redial to redialMax.
	redial, redialMax = 50 * time.Millisecond, 2 * time.Second
	// sessionPause is the pause before a new session, in case a guest ends every session immediately.
	sessionPause = 20 * time.Millisecond
)

// ErrRestarted ends the calls in progress when the guest's agent has restarted.
var ErrRestarted = fmt.Errorf("the guest's agent has restarted: %w", errdefs.ErrUnavailable)

// Agent connects to the agent in one machine's guest. The guest may have no agent. An Agent's methods are safe for
// concurrent use.
type Agent struct {
	socket string
	log    *slog.Logger
	cancel context.CancelFunc
	done   chan struct{}
	// opening is a lock, held while a stream is opened, because the guest accepts streams only in the order of their
	// numbers.
	opening chan struct{}

	mu      sync.Mutex
	mux     *wire.Mux     // the session that the guest has welcomed; nil if there is none
	version uint64        // the protocol's, of the last session
	refused error         // why an agent that answers cannot be used
	changed chan struct{} // closed when mux or refused changes
}

// Open returns an Agent that connects to the given socket, which is a machine's machine.AgentSocket. The machine need
// not run yet.
func Open(socket string, log *slog.Logger) *Agent {
	ctx, cancel := context.WithCancel(context.Background())
	a := &Agent{socket: socket, log: log, cancel: cancel, done: make(chan struct{}), opening: make(chan struct{}, 1),
		changed: make(chan struct{})}
	go a.run(ctx)
	return a
}

// Close closes the connection, which ends all operations in the guest.
func (a *Agent) Close() error {
	a.cancel()
	<-a.done
	return nil
}

// Ready reports whether the guest's agent answers. It does not wait.
func (a *Agent) Ready() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mux != nil
}

// ServesSessions reports whether the guest's agent answers and serves the session ports too. It does not wait.
func (a *Agent) ServesSessions() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mux != nil && a.version >= wire.SessionsVersion
}

// Wait waits until the agent answers. It returns errdefs.ErrUnavailable if ctx ends first.
func (a *Agent) Wait(ctx context.Context) error {
	for {
		a.mu.Lock()
		mux, refused, changed := a.mux, a.refused, a.changed
		a.mu.Unlock()
		if mux != nil {
			return nil
		}
		if refused != nil {
			return refused
		}
		select {
		case <-changed:
		case <-a.done:
			return fmt.Errorf("the connection to the guest's agent is closed: %w", errdefs.ErrUnavailable)
		case <-ctx.Done():
			return fmt.Errorf("no tripod-agent answers in the guest (is it started there?): %w (%w)", context.Cause(ctx), errdefs.ErrUnavailable)
		}
	}
}

func (a *Agent) setSession(mux *wire.Mux, refused error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mux, a.refused = mux, refused
	close(a.changed)
	a.changed = make(chan struct{})
}

func (a *Agent) session() (*wire.Mux, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.refused != nil {
		return nil, a.refused
	}
	if a.mux == nil {
		return nil, fmt.Errorf("no tripod-agent answers in the guest: start it there, from the disk labelled %s: %w", Label,
			errdefs.ErrUnavailable)
	}
	return a.mux, nil
}

// run keeps the agent connected until ctx ends.
func (a *Agent) run(ctx context.Context) {
	defer close(a.done)
	pause := redial
	for ctx.Err() == nil {
		conn, err := unixsocket.Dial(ctx, a.socket)
		if err == nil {
			pause = redial
			stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
			err = a.serve(ctx, conn)
			stop()
			_ = conn.Close()
		}
		if ctx.Err() == nil {
			a.log.Debug("no connection to the guest's agent", "socket", a.socket, "err", err)
		}
		select {
		case <-time.After(pause):
			pause = min(2*pause, redialMax)
		case <-ctx.Done():
		}
	}
}

// link is one connection.
type link struct {
	agent *Agent
	out   *wire.LockedWriter
	mux   *wire.Mux // the session of the last Hello
}

// serve handles the frames of a connection until the connection ends.
func (a *Agent) serve(ctx context.Context, conn io.ReadWriter) error {
	l := &link{agent: a, out: &wire.LockedWriter{W: conn}}
	defer func() { l.end(fmt.Errorf("the connection to the guest's agent has ended: %w", errdefs.ErrUnavailable)) }()
	if err := l.hello(); err != nil {
		return err
	}
	frames := wire.NewReader(conn)
	for {
		f, err := frames.Next()
		if err != nil {
			return err
		}
		switch {
		case f.Kind == wire.KindReady && f.Session == 0:
			l.end(ErrRestarted)
			err = l.newSession(ctx)
		case f.Session != l.mux.Session():
			// a frame of an earlier session
		case f.Kind == wire.KindWelcome:
			err = l.welcome(f)
		case f.Stream == 0:
			// a Pong, or a frame of a newer protocol
		default:
			err = l.mux.Handle(f)
		}
		if errors.Is(err, wire.ErrSession) {
			a.log.Warn("guest's agent violated the protocol; ending the session", "socket", a.socket, "err", err)
			l.end(fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable))
			err = l.newSession(ctx)
		}
		if err != nil {
			return err
		}
	}
}

// hello begins a session. It first writes a zero byte, to end any incomplete earlier frame.
func (l *link) hello() error {
	var number [8]byte
	_, _ = rand.Read(number[:])                           // never fails
	session := binary.BigEndian.Uint64(number[:])/2*2 + 1 // never 0, because 0 means no session
	l.mux = wire.NewMux(session, control)
	hello := wire.Hello{MinVersion: wire.MinVersion, MaxVersion: wire.MaxVersion}
	_, err := l.out.Write(wire.AppendFrame([]byte{0}, session, 0, wire.KindHello, hello.Append(nil)))
	return err
}

// newSession begins a session after sessionPause.
func (l *link) newSession(ctx context.Context) error {
	select {
	case <-time.After(sessionPause):
	case <-ctx.Done():
		return ctx.Err()
	}
	return l.hello()
}

func (l *link) welcome(f wire.Frame) error {
	if l.agent.Ready() {
		return nil // a repeated Welcome
	}
	var w wire.Welcome
	if err := w.Parse(f.Payload); err != nil {
		return fmt.Errorf("%w: %w", wire.ErrSession, err)
	}
	if w.Version < wire.MinVersion || w.Version > wire.MaxVersion {
		l.agent.setSession(nil,
			fmt.Errorf("tripod-agent %s in the guest supports none of the protocol versions %d to %d: use the program on the disk labelled %s: %w",
				printable(w.Program), wire.MinVersion, wire.MaxVersion, Label, errdefs.ErrUnavailable))
		return nil
	}
	go l.mux.Write(l.out)
	l.agent.mu.Lock()
	l.agent.version = w.Version
	l.agent.mu.Unlock()
	l.agent.setSession(l.mux, nil)
	return nil
}

// end ends the session.
func (l *link) end(err error) {
	l.agent.setSession(nil, nil)
	if l.mux != nil {
		l.mux.End(err)
	}
}
