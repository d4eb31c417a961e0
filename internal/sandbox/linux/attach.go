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
	// partTime is how long the backend's Close waits for conmons to notice.
	partTime = time.Second
)

// Attach implements sandbox.Attacher. A client that does not read its output does not block the container: once
// stream.MaxBacklog waits for it, it is disconnected with errdefs.ErrResourceExhausted. After Attach returns, a read of
// req.Stdin or a write to req.Stdout or req.Stderr may still be under way.
func (b *Backend) Attach(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, req sandbox.AttachRequest) error {
	h, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return err
	}
	hub, client, err := l.join(b.bundleOf(h), c)
	if err != nil {
		return err
	}
	defer hub.drop(client)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go b.followAttachSize(h, req.Resize, ctx.Done())
	if req.Stdin != nil && c.Config.GetStdin() {
		if hub.once {
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

// join adds a client to the run's hub and opens the hub if necessary.
func (l *life) join(bundle string, c *sandbox.Container) (*hub, *stream.OutputQueue, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := make(chan struct{})
	if l.hub == nil {
		close(before)
	} else {
		if client := l.hub.add(); client != nil {
			return l.hub, client, nil
		}
		before = l.hub.gone
	}
	conn, err := dialAttach(bundle)
	if err != nil {
		return nil, nil, err
	}
	once := endsStdin(c.Config.GetStdinOnce(), c.Config.GetTty())
	hub, client := newHub(conn, c.Config.GetStdin(), once, before)
	l.hub = hub
	return hub, client, nil
}

// endsStdin reports whether the end of the first client's input closes the container's stdin. A terminal stays open: its
// users have other ways to end input (Ctrl-D), and it serves the next client.
func endsStdin(once, tty bool) bool { return once && !tty }

// dialAttach connects to conmon's attach socket. The socket's path is too long for a socket address, so it goes through an
// open directory descriptor.
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

// disconnectAll has all hubs disconnect and waits for at most partTime.
func (b *Backend) disconnectAll() {
	limit, hubs := time.After(partTime), b.hubs()
	for _, hub := range hubs {
		go hub.leave()
	}
	for _, hub := range hubs {
		select {
		case <-hub.gone:
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

func (b *Backend) followAttachSize(h *handle, sizes <-chan sandbox.TermSize, stop <-chan struct{}) {
	for {
		select {
		case size, ok := <-sizes:
			if !ok {
				return
			}
			line := fmt.Sprintf("1 %d %d\n", min(size.Height, maxSide), min(size.Width, maxSide))
			if err := control(b.bundleOf(h), line); err != nil {
				b.log.Debug("resize an attached terminal", "container", h.ID, "err", err)
			}
		case <-stop:
			return
		}
	}
}
