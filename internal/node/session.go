package node

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// ContainerSession returns what another process needs to serve exec and attach sessions of a running container. The
// errors are those of Exec; ErrNotImplemented means that only the daemon can serve these sessions.
func (n *Node) ContainerSession(ctx context.Context, id string, kind sandbox.SessionKind) (sandbox.Session, error) {
	planner, rec, c, err := runningContainer[sandbox.SessionPlanner](n, id, "sessions that outlive the daemon")
	if err != nil {
		return sandbox.Session{}, err
	}
	plan, err := planner.PlanSession(ctx, rec.sandboxPod(), c.sandboxContainer(), kind)
	return sandbox.Session{Handler: rec.handlerOf(c), Pod: rec.ID, Container: c.ID, DetachAtEOF: detachesAtEOF(c), Plan: plan}, err
}

// PodSession returns what another process needs to serve port-forward sessions of a pod. The errors are those of
// DialPod; ErrNotImplemented means that only the daemon can serve these sessions.
func (n *Node) PodSession(ctx context.Context, id string) (sandbox.Session, error) {
	p, err := n.Pod(id)
	if err != nil {
		return sandbox.Session{}, err
	}
	if !p.Ready() {
		return sandbox.Session{}, fmt.Errorf("pod %s is %s: %w", p.ID, p.State, errdefs.ErrFailedPrecondition)
	}
	s := sandbox.Session{Handler: p.Handler, Pod: p.ID, Netns: p.Netns}
	if _, ok := n.Backends[p.Handler].(sandbox.Dialer); !ok {
		return s, nil
	}
	planner, ok := n.Backends[p.Handler].(sandbox.SessionPlanner)
	if !ok {
		return s, unsupported(p.Handler, "sessions that outlive the daemon")
	}
	if err := n.handlerErrors.get(p.Handler); err != nil {
		return s, notReady(p.Handler, err)
	}
	s.Plan, err = planner.PlanSession(ctx, p.sandboxPod(), p.running(), sandbox.SessionPortForward)
	return s, err
}

// ReapSessions makes every backend remove what killed sessions have left behind.
func (n *Node) ReapSessions(ctx context.Context) {
	for handler, b := range n.Backends {
		if reaper, ok := b.(sandbox.SessionReaper); ok {
			if err := reaper.ReapSessions(ctx); err != nil {
				n.log.Warn("cannot remove what sessions have left behind", "handler", handler, "err", err)
			}
		}
	}
}
