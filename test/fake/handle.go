package fake

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// handle is a running container.
type handle struct {
	stop  chan stopOrder
	ended chan struct{} // closed when the container has ended
}

// stopOrder is an order to end a container.
type stopOrder struct {
	force bool
}

// watch waits until the container exits by itself or an order ends it, and records and reports the end.
func (b *Backend) watch(p *sandbox.Pod, c *sandbox.Container, h *handle, s containerState) {
	defer close(h.ended)
	var ends <-chan time.Time
	if !s.EndsAt.IsZero() {
		timer := time.NewTimer(time.Until(s.EndsAt))
		defer timer.Stop()
		ends = timer.C
	}
	ignore, _ := strconv.ParseBool(behaviour(p, c, "ignore-stop"))
	for {
		select {
		case <-ends:
			b.end(p, c, s.ended(s.EndsWith, s.EndsAt))
			return
		case code := <-b.exitOrders(c.ID):
			b.end(p, c, s.ended(code, time.Now()))
			return
		case o := <-h.stop:
			if o.force {
				b.end(p, c, s.ended(137, time.Now()))
				return
			}
			if !ignore {
				b.end(p, c, s.ended(143, time.Now()))
				return
			}
		}
	}
}

// end records and reports the end of a container.
func (b *Backend) end(p *sandbox.Pod, c *sandbox.Container, s containerState) {
	if err := write(b.containerFile(p.ID, c.ID), s); err != nil {
		b.config.Logger.Error("write the end of a fake container", "container", c.ID, "err", err)
	}
	b.mu.Lock()
	delete(b.handles, c.ID)
	sink := b.sink
	b.mu.Unlock()
	if sink != nil {
		sink(sandbox.Event{PodID: p.ID, ContainerID: c.ID, Status: s.status()})
	}
}

// Exec simulates a few programs for tests of stdio and exit codes: echo WORDS, cat, exit N, hang.
func (b *Backend) Exec(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, req sandbox.ExecRequest) (int32, error) {
	if err := b.step(ctx, p, c, "exec"); err != nil {
		return 0, err
	}
	stdout := req.Stdout
	if stdout == nil {
		stdout = io.Discard
	}
	switch args := req.Cmd[1:]; req.Cmd[0] {
	case "echo":
		_, err := fmt.Fprintln(stdout, strings.Join(args, " "))
		return 0, err
	case "cat":
		if req.Stdin == nil {
			return 0, nil
		}
		_, err := io.Copy(stdout, req.Stdin)
		return 0, err
	case "exit":
		code, err := strconv.ParseInt(strings.Join(args, " "), 10, 32)
		if err != nil {
			return 0, fmt.Errorf("exit %q: %w: %w", args, err, errdefs.ErrInvalidArgument)
		}
		return int32(code), nil
	case "hang":
		<-ctx.Done()
		return 0, context.Cause(ctx)
	default:
		return 0, fmt.Errorf("fake containers have no program %q: %w", req.Cmd[0], errdefs.ErrInvalidArgument)
	}
}
