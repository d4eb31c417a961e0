package linux

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/sandbox"
)

const (
	// attachPacket is at least what conmon sends at once: a byte that names the stream, and 8 KiB of it.
	attachPacket = 32 << 10
	// attachWrite is the most that conmon takes at once.
	attachWrite = 8 << 10
	// The streams as conmon names them.
	attachStdout, attachStderr = 2, 3
	// maxSide is the largest height or width that conmon takes.
	maxSide = 1000
)

// Attach implements sandbox.Attacher. A client that does not read its output holds the container up, as everywhere;
// the caller's context is the way out. After Attach has returned a read of req.Stdin may still be under way.
func (b *Backend) Attach(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, req sandbox.AttachRequest) error {
	h, _, _, err := b.runningContainer(p, c)
	if err != nil {
		return err
	}
	conn, err := dialAttach(h.bundle)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	stop := make(chan struct{})
	defer close(stop)
	go b.followAttachSize(h, req.Resize, stop)
	if req.Stdin != nil && c.Config.GetStdin() {
		go sendInput(conn, req.Stdin)
	}
	err = receiveOutput(conn, req)
	if ctx.Err() != nil {
		return fmt.Errorf("attach: %w", context.Cause(ctx))
	}
	return err
}

// dialAttach connects to conmon's attach socket. Its path is too long for a socket address, so it goes through an open
// directory.
func dialAttach(bundle string) (*net.UnixConn, error) {
	dir, err := unix.Open(bundle, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("attach: %w", err)
	}
	defer unix.Close(dir)
	name := fmt.Sprintf("/proc/self/fd/%d/attach", dir)
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: name, Net: "unixpacket"})
	if err != nil {
		return nil, fmt.Errorf("attach to the container's monitor: %w: %w", err, errdefs.ErrUnavailable)
	}
	return conn, nil
}

// sendInput sends input until its end, which conmon passes on when the container was made with stdin_once.
func sendInput(conn *net.UnixConn, input io.Reader) {
	buf := make([]byte, attachWrite)
	for {
		n, err := input.Read(buf)
		if n > 0 {
			if _, err := conn.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			_ = conn.CloseWrite()
			return
		}
	}
}

// receiveOutput passes packets on until the container ends or a writer fails, which is a client that went away.
func receiveOutput(conn *net.UnixConn, req sandbox.AttachRequest) error {
	buf := make([]byte, attachPacket)
	for {
		n, err := conn.Read(buf)
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("attach: %w", err)
		}
		if n < 2 {
			continue
		}
		to := req.Stdout
		if buf[0] == attachStderr && !req.TTY {
			to = req.Stderr
		}
		if to == nil {
			continue
		}
		if _, err := to.Write(buf[1:n]); err != nil {
			return fmt.Errorf("attach: the client went away: %w", err)
		}
	}
}

func (b *Backend) followAttachSize(h *handle, sizes <-chan sandbox.TermSize, stop <-chan struct{}) {
	for {
		select {
		case size, ok := <-sizes:
			if !ok {
				return
			}
			line := fmt.Sprintf("1 %d %d\n", min(size.Height, maxSide), min(size.Width, maxSide))
			if err := control(h.bundle, line); err != nil {
				b.log.Debug("size of an attached terminal", "container", h.id, "error", err)
			}
		case <-stop:
			return
		}
	}
}
