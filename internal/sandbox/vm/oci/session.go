package oci

import (
	"context"
	"fmt"
	"net"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
)

// maxSessions is the maximum number of exec and attach sessions and connections to the guest's localhost in a pod, so that the
// streams suffice for the daemon's own calls.
const maxSessions = wire.MaxStreams / 2

// Exec implements sandbox.Execer.
func (o *Backend) Exec(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, req sandbox.ExecRequest) (int32, error) {
	return o.session(ctx, p, c, guestapi.Request{
		Method: guestapi.MethodExec, Container: c.ID, Cmd: req.Cmd, TTY: req.TTY,
		Stdin: req.Stdin != nil, Stdout: req.Stdout != nil, Stderr: req.Stderr != nil && !req.TTY,
	}, req)
}

// Attach implements sandbox.Attacher.
func (o *Backend) Attach(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, req sandbox.AttachRequest) error {
	_, err := o.session(ctx, p, c, guestapi.Request{
		Method: guestapi.MethodAttach, Container: c.ID, TTY: req.TTY, Stdin: req.Stdin != nil, Stdout: req.Stdout != nil,
		Stderr: req.Stderr != nil,
	}, sandbox.ExecRequest{TTY: req.TTY, Stdin: req.Stdin, Stdout: req.Stdout, Stderr: req.Stderr, Resize: req.Resize})
	return err
}

// Dial implements sandbox.Dialer. Connections to the guest's localhost are sessions.
func (o *Backend) Dial(ctx context.Context, p *sandbox.Pod, _ *sandbox.Container, network, address string) (net.Conn, error) {
	end, err := o.beginSession(p.ID)
	if err != nil {
		return nil, err
	}
	mp, mc := o.machine(p)
	conn, err := o.machines.Dial(ctx, mp, mc, network, address)
	if through, ok := conn.(*agent.Conn); ok && err == nil {
		return sessionConn{through, end}, nil
	}
	end()
	return conn, err
}

// sessionConn is a connection that is a session of its pod.
type sessionConn struct {
	*agent.Conn
	end func()
}

// Close implements net.Conn.
func (c sessionConn) Close() error {
	defer c.end()
	return c.Conn.Close()
}

// session makes a call for a running container that takes as long as its client wants.
func (o *Backend) session(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, r guestapi.Request,
	with sandbox.ExecRequest) (int32, error) {
	if _, _, err := o.ledger.GetRun(p.ID, c.ID); err != nil {
		return 0, err
	}
	end, err := o.beginSession(p.ID)
	if err != nil {
		return 0, err
	}
	defer end()
	return o.stream(ctx, p.ID, r, with)
}

// beginSession counts a session of a pod until the returned function is called.
func (o *Backend) beginSession(id string) (end func(), err error) {
	pod, err := o.running(id)
	if err != nil {
		return nil, err
	}
	end = sync.OnceFunc(func() { pod.sessions.Add(-1) })
	if pod.sessions.Add(1) > maxSessions {
		end()
		return nil, fmt.Errorf("pod %s has %d exec and attach sessions and forwarded connections, the maximum: %w", id, maxSessions,
			errdefs.ErrResourceExhausted)
	}
	return end, nil
}

// ReopenLog implements sandbox.LogReopener.
func (o *Backend) ReopenLog(_ context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	_, l, err := o.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return err
	}
	return l.log.Reopen()
}
