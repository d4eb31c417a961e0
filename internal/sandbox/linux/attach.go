package linux

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/stream"
)

const (
	// maxSide is the largest height or width that conmon accepts.
	maxSide = 1000
	// disconnectTime limits how long Close waits for conmons to notice that the hubs disconnect.
	disconnectTime = time.Second
)

// Attach implements sandbox.Attacher. A client that does not read its output cannot block the container: once the
// client's backlog reaches stream.MaxBacklog, the client is disconnected with errdefs.ErrResourceExhausted. After
// Attach returns, a read of req.Stdin or a write to req.Stdout or req.Stderr can still be in progress.
func (b *Backend) Attach(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, req sandbox.AttachRequest) error {
	h, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return err
	}
	hub, client, err := l.join(b.bundleOf(h), c)
	if err != nil {
		return err
	}
	defer hub.remove(client)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go followSize(req.Resize, ctx.Done(), func(size sandbox.TermSize) {
		line := fmt.Sprintf("1 %d %d\n", min(size.Height, maxSide), min(size.Width, maxSide))
		if err := control(b.bundleOf(h), line); err != nil {
			b.log.Debug("resize an attached terminal", "container", h.ID, "err", err)
		}
	})
	if req.Stdin != nil && c.Config.GetStdin() {
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
func (l *life) join(bundle string, c *sandbox.Container) (*hub, *stream.OutputQueue, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	previous := make(chan struct{})
	if l.hub == nil {
		close(previous)
	} else {
		if client := l.hub.add(); client != nil {
			return l.hub, client, nil
		}
		previous = l.hub.disconnected
	}
	conn, err := dialAttach(bundle)
	if err != nil {
		return nil, nil, err
	}
	once := endsStdin(c.Config.GetStdinOnce(), c.Config.GetTty())
	hub, client := newHub(conn, c.Config.GetStdin(), once, previous)
	l.hub = hub
	return hub, client, nil
}

// endsStdin reports whether the end of the first client's input closes the container's stdin. A terminal stays open for
// the next client, because its users can end input with Ctrl-D.
func endsStdin(once, tty bool) bool { return once && !tty }

// dialAttach connects to conmon's attach socket. The socket's path is too long for a socket address, so the address
// goes through a descriptor of the bundle's directory.
func dialAttach(bundle string) (*net.UnixConn, error) {
	dir, err := unix.Open(bundle, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("attach: %w", err)
	}
	defer unix.Close(dir)
	name := fmt.Sprintf("/proc/self/fd/%d/attach", dir)
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: name, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("connect to conmon's attach socket: %w: %w", err, errdefs.ErrUnavailable)
	}
	return conn, nil
}

// disconnectAll disconnects all hubs and waits at most disconnectTime for them.
func (b *Backend) disconnectAll() {
	limit, hubs := time.After(disconnectTime), b.hubs()
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

func (b *Backend) hubs() (found []*hub) {
	for _, h := range b.ledger.All() {
		if _, l := h.Snapshot(); l != nil {
			l.mu.Lock()
			if l.hub != nil {
				found = append(found, l.hub)
			}
			l.mu.Unlock()
		}
	}
	return found
}
