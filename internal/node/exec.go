package node

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/spans"
)

// Exec runs a program in a running container and returns its exit code. Errors: ErrNotFound, ErrFailedPrecondition (not
// running), ErrNotImplemented (the backend has no exec), or the backend's own errors.
func (n *Node) Exec(ctx context.Context, id string, req sandbox.ExecRequest) (int32, error) {
	execer, rec, c, err := runningContainer[sandbox.Execer](n, id, "exec")
	if err != nil {
		return 0, err
	}
	ctx, end := spans.Start(ctx, "backend.exec", spans.Pod(rec.ID))
	code, err := execer.Exec(ctx, rec.sandboxPod(), c.sandboxContainer(), req)
	end(err)
	return code, err
}

// Attach connects the client to the stdio of a running container. It returns when the container exits or the client
// disconnects. When the client closes its input, Attach also returns, with one exception: if the end of the input
// closes the container's stdin (stdin_once without a terminal), the client keeps receiving output. The errors are those
// of Exec.
func (n *Node) Attach(ctx context.Context, id string, req sandbox.AttachRequest) error {
	attacher, rec, c, err := runningContainer[sandbox.Attacher](n, id, "attach")
	if err != nil {
		return err
	}
	attach := func(ctx context.Context, req sandbox.AttachRequest) error {
		return attacher.Attach(ctx, rec.sandboxPod(), c.sandboxContainer(), req)
	}
	if !detachesAtEOF(c) {
		return attach(ctx, req)
	}
	return sandbox.AttachUntilEOF(ctx, req, attach)
}

// detachesAtEOF reports whether the end of a client's input ends the client's attach session.
func detachesAtEOF(c *Container) bool { return !c.Config.GetStdinOnce() || c.Config.GetTty() }

// Channels returns two things for a running container: a connection for the container's channels (sandbox.Channeler),
// and the name of the container's group. Containers in one group deliver messages to each other directly. The errors
// are those of Exec, and ErrFailedPrecondition for a container without channels.
func (n *Node) Channels(ctx context.Context, id string) (conn net.Conn, group string, err error) {
	channeler, rec, c, err := runningContainer[sandbox.Channeler](n, id, "channels")
	if err != nil {
		return nil, "", err
	}
	return channeler.Channels(ctx, rec.sandboxPod(), c.sandboxContainer())
}

// ReopenLog makes a running container's log writer reopen its file after a rotation. The errors are those of Exec.
func (n *Node) ReopenLog(ctx context.Context, id string) error {
	reopener, rec, c, err := runningContainer[sandbox.LogReopener](n, id, "log rotation")
	if err != nil {
		return err
	}
	return reopener.ReopenLog(ctx, rec.sandboxPod(), c.sandboxContainer())
}

// DialPod opens a connection from the pod's network namespace. For a pod on the host network, that is the node's
// namespace. A backend that is a sandbox.Dialer opens the connection itself.
func (n *Node) DialPod(ctx context.Context, podID, network, address string) (net.Conn, error) {
	p, err := n.Pod(podID)
	if err != nil {
		return nil, err
	}
	if !p.Ready() {
		return nil, fmt.Errorf("pod %s is %s: %w", p.ID, p.State, errdefs.ErrFailedPrecondition)
	}
	dialer, ok := n.Backends[p.Handler].(sandbox.Dialer)
	if !ok {
		return n.Network.Dial(ctx, p.Netns, network, address)
	}
	if err := n.handlerErrors.get(p.Handler); err != nil {
		return nil, notReady(p.Handler, err)
	}
	return dialer.Dial(ctx, p.sandboxPod(), p.running(), network, address)
}

// running returns the pod's last running container, or nil.
func (p *Pod) running() (running *sandbox.Container) {
	for _, c := range p.Containers {
		if c.State == Running {
			running = c.sandboxContainer()
		}
	}
	return running
}

// Inspect returns details of a sandbox or container that have no fields in the CRI. They come from the node and the
// backend. The result is a JSON object under the key "info", where CRI clients expect it. An empty containerID means
// the sandbox.
func (n *Node) Inspect(ctx context.Context, podID, containerID string) (map[string]string, error) {
	p, err := n.pool.pod(podID)
	if err != nil {
		return nil, err
	}
	rec := p.rec.Load()
	var c *sandbox.Container
	handler := rec.Handler
	about := map[string]any{
		"sandboxID": rec.ID, "handler": rec.Handler, "state": rec.UnitState(), "component": rec.Component, "intent": rec.Intent,
		"netns": rec.Netns, "config": rec.Config,
	}
	if containerID != "" {
		record := rec.Container(containerID)
		if record == nil {
			return nil, notFound("container", containerID)
		}
		c, handler = record.sandboxContainer(), rec.handlerOf(record)
		about = map[string]any{"sandboxID": rec.ID, "handler": handler, "state": record.State, "pid": record.Pid, "imageID": record.ImageID,
			"intent": record.Intent, "config": record.Config}
	}
	if containerID == "" && rec.Netns != "" {
		result, err := n.Network.CNIResult(rec.ID)
		if err != nil {
			return nil, err
		}
		about["cniResult"] = result
	}
	inspector, ok := n.Backends[handler].(sandbox.Inspector)
	if ok && rec.previous(containerID) == nil { // the backend knows only the newest attempt
		more, err := inspector.Inspect(ctx, rec.sandboxPod(), c)
		if err != nil {
			return nil, err
		}
		maps.Copy(about, more)
	}
	raw, err := json.Marshal(about)
	if err != nil {
		return nil, err
	}
	return map[string]string{"info": string(raw)}, nil
}

// runningContainer returns a running container and its backend as a B. It returns an error if the container is not
// Running or its backend is not a B. The last parameter names the operation in error messages.
func runningContainer[B any](n *Node, id, what string) (backend B, rec *Pod, c *Container, err error) {
	p, id, err := n.orderContainer(id)
	if err != nil {
		return backend, nil, nil, err
	}
	rec = p.rec.Load()
	if c = rec.Container(id); c == nil {
		return backend, nil, nil, notFound("container", id)
	}
	if c.State != Running {
		return backend, nil, nil, fmt.Errorf("%s: container %s is %s, not %s: %w", what, id, c.State, Running, errdefs.ErrFailedPrecondition)
	}
	backend, ok := p.backendOf(c).(B)
	if !ok {
		return backend, nil, nil, unsupported(rec.handlerOf(c), what)
	}
	return backend, rec, c, nil
}

func unsupported(handler, what string) error {
	return fmt.Errorf("pods of runtime handler %q have no %s: %w", handler, what, errdefs.ErrNotImplemented)
}
