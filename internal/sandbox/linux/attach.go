package linux

import (
	"context"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/stream"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

const (
	// maxSide is the largest height or width that conmon accepts.
	maxSide = 1000
	// disconnectTime limits how long Close waits for conmons to notice that the hubs disconnect.
	disconnectTime = time.Second
)

// Attach implements sandbox.Attacher.
func (b *Backend) Attach(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, req sandbox.AttachRequest) error {
	plan, err := b.plan(p, c)
	if err != nil {
		return err
	}
	return b.sessions.attach(ctx, plan, req)
}

// attach connects a client to a container's stdio. A client that does not read its output cannot block the container:
// once the client's backlog reaches stream.MaxBacklog, the client is disconnected with errdefs.ErrResourceExhausted.
// After attach returns, a read of req.Stdin or a write to req.Stdout or req.Stderr can still be in progress.
func (s *Sessions) attach(ctx context.Context, p sessionPlan, req sandbox.AttachRequest) error {
	hub, client, err := s.join(ctx, p)
	if err != nil {
		return err
	}
	defer hub.remove(client)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go followSize(req.Resize, ctx.Done(), func(size sandbox.TermSize) {
		line := fmt.Sprintf("1 %d %d\n", min(size.Height, maxSide), min(size.Width, maxSide))
		if err := control(p.Bundle, line); err != nil {
			s.log.Debug("resize an attached terminal", "container", p.ID, "err", err)
		}
	})
	if req.Stdin != nil && p.Stdin {
		if hub.stdinOnce {
			defer hub.endInput()
		}
		go hub.send(ctx, req.Stdin)
	}
	stderr := req.Stderr
	if req.TTY {
		stderr = req.Stdout
	}
	return client.Serve(ctx, req.Stdout, stderr)
}

// join adds a client to the run's hub, or to a new hub if no hub accepts clients.
func (s *Sessions) join(ctx context.Context, p sessionPlan) (*hub, *stream.OutputQueue, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	previous := make(chan struct{})
	if old := s.hubs[p.Init]; old == nil {
		close(previous)
	} else {
		if client := old.add(); client != nil {
			return old, client, nil
		}
		previous = old.disconnected
	}
	conn, err := dialAttach(ctx, p.Bundle)
	if err != nil {
		return nil, nil, err
	}
	hub, client := newHub(conn, p.Stdin, endsStdin(p.StdinOnce, p.TTY), previous)
	s.hubs[p.Init] = hub
	go func() {
		<-hub.disconnected
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.hubs[p.Init] == hub {
			delete(s.hubs, p.Init)
		}
	}()
	return hub, client, nil
}

// endsStdin reports whether the end of the first client's input closes the container's stdin. A terminal stays open for
// the next client, because its users can end input with Ctrl-D.
func endsStdin(once, tty bool) bool { return once && !tty }

// dialAttach connects to conmon's attach socket.
func dialAttach(ctx context.Context, bundle string) (*net.UnixConn, error) {
	conn, err := unixsocket.DialPacket(ctx, filepath.Join(bundle, "attach"))
	if err != nil {
		return nil, fmt.Errorf("attach: %w: %w", err, errdefs.ErrUnavailable)
	}
	return conn, nil
}

// disconnectAll disconnects all hubs and waits at most disconnectTime for them.
func (s *Sessions) disconnectAll() {
	s.mu.Lock()
	hubs := slices.Collect(maps.Values(s.hubs))
	s.mu.Unlock()
	limit := time.After(disconnectTime)
	for _, hub := range hubs {
		go hub.disconnect()
	}
	for _, hub := range hubs {
		select {
		case <-hub.disconnected:
		case <-limit:
			return
		}
	}
}
