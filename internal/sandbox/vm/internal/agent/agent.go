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
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

const (
	// redial and redialMax are the first and the last pause between two tries to connect.
	redial, redialMax = 50 * time.Millisecond, 2 * time.Second
	// readyPause is the least time between two sessions that the guest ends.
	readyPause = 20 * time.Millisecond
)

// Agent is the agent of one machine, there or not. Its methods may be called from many goroutines.
type Agent struct {
	socket string
	log    *slog.Logger
	cancel context.CancelFunc
	done   chan struct{}
	// opening is held from a stream's number to its first frame, for the guest takes numbers only in their order.
	opening chan struct{}

	mu      sync.Mutex
	mux     *wire.Mux // the session, if the guest has welcomed it
	program string
	refused error         // why there is none though there is an agent
	changed chan struct{} // closed when one of these changes
}

// Open keeps a connection to socket, machine.AgentSocket of a machine, until Close. The machine need not run yet.
func Open(socket string, log *slog.Logger) *Agent {
	ctx, cancel := context.WithCancel(context.Background())
	a := &Agent{socket: socket, log: log, cancel: cancel, done: make(chan struct{}), opening: make(chan struct{}, 1), changed: make(chan struct{})}
	go a.keep(ctx)
	return a
}

// Close ends the connection, and with it what runs in the guest for it.
func (a *Agent) Close() error {
	a.cancel()
	<-a.done
	return nil
}

// Ready tells whether the guest's agent answers. It costs nothing.
func (a *Agent) Ready() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.mux != nil
}

// Program is the version of the guest's agent, "" when none answers.
func (a *Agent) Program() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mux == nil {
		return ""
	}
	return a.program
}

// Wait returns when the agent answers: errdefs.ErrUnavailable when it has not by the end of ctx.
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
			return fmt.Errorf("the machine's agent is not used any more: %w", errdefs.ErrUnavailable)
		case <-ctx.Done():
			return fmt.Errorf("no tripod-agent answers in the guest (is it started there?): %w (%w)", context.Cause(ctx), errdefs.ErrUnavailable)
		}
	}
}

// set changes what there is of a session.
func (a *Agent) set(mux *wire.Mux, program string, refused error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mux, a.program, a.refused = mux, program, refused
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
		return nil, fmt.Errorf("no tripod-agent answers in the guest: start the program from the disk labelled %s there: %w", Label, errdefs.ErrUnavailable)
	}
	return a.mux, nil
}

// keep connects until the end.
func (a *Agent) keep(ctx context.Context) {
	defer close(a.done)
	pause := redial
	for ctx.Err() == nil {
		conn, err := machine.Dial(ctx, a.socket)
		if err == nil {
			pause = redial
			stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
			err = a.talk(ctx, conn)
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
	out   *lockedWriter
	mux   *wire.Mux // the session that was said Hello to
}

// talk reads what comes over a connection until it ends.
func (a *Agent) talk(ctx context.Context, conn io.ReadWriter) error {
	l := &link{agent: a, out: &lockedWriter{w: conn}}
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
			err = l.ready(ctx)
		case f.Session != l.mux.Session():
			// said for another one, before
		case f.Kind == wire.KindWelcome:
			err = l.welcome(f)
		case f.Stream == 0:
			// a Pong, or what a newer agent says
		default:
			err = l.mux.Handle(f)
		}
		if errors.Is(err, wire.ErrSession) {
			a.log.Warn("the guest's agent broke the protocol; its session is ended", "socket", a.socket, "err", err)
			l.end(fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable))
			err = l.again(ctx)
		}
		if err != nil {
			return err
		}
	}
}

// hello begins a session. The zero before it ends half a frame.
func (l *link) hello() error {
	var number [8]byte
	_, _ = rand.Read(number[:])                           // never fails
	session := binary.BigEndian.Uint64(number[:])/2*2 + 1 // 0 is no session
	l.mux = wire.NewMux(session, control)
	hello := wire.Hello{MinVersion: wire.MinVersion, MaxVersion: wire.MaxVersion}
	_, err := l.out.Write(wire.AppendFrame([]byte{0}, session, 0, wire.KindHello, hello.Append(nil)))
	return err
}

// ready is the guest's saying that it has no session: it is asked again, or a new one is begun if one was up.
func (l *link) ready(ctx context.Context) error {
	l.end(fmt.Errorf("the guest's agent has restarted: %w", errdefs.ErrUnavailable))
	return l.again(ctx)
}

// again begins another session, not too soon: a guest may end each at once.
func (l *link) again(ctx context.Context) error {
	select {
	case <-time.After(readyPause):
	case <-ctx.Done():
		return ctx.Err()
	}
	return l.hello()
}

func (l *link) welcome(f wire.Frame) error {
	if l.agent.Ready() {
		return nil // the answer to a repeated Hello
	}
	var w wire.Welcome
	if err := w.Parse(f.Payload); err != nil {
		return fmt.Errorf("%w: %w", wire.ErrSession, err)
	}
	program := printable(w.Program)
	if w.Version < wire.MinVersion || w.Version > wire.MaxVersion {
		l.agent.set(nil, "", fmt.Errorf("tripod-agent %s in the guest speaks none of the versions %d to %d of the protocol: use the one from the disk labelled %s: %w",
			program, wire.MinVersion, wire.MaxVersion, Label, errdefs.ErrUnavailable))
		return nil
	}
	go l.mux.Write(l.out)
	l.agent.set(l.mux, program, nil)
	return nil
}

// end ends the session.
func (l *link) end(err error) {
	l.agent.set(nil, "", nil)
	if l.mux != nil {
		l.mux.End(err)
	}
}

// lockedWriter writes one frame at a time: a session that ends may still be writing when the next one begins.
type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}
