package node

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// AttachDisk gives a running container a disk; see sandbox.DiskAttacher. The backend keeps the record of the disk, which is
// not a part of the container's configuration.
func (n *Node) AttachDisk(ctx context.Context, id string, d sandbox.Disk) error {
	return n.changeDisks(ctx, id, func(ctx context.Context, b sandbox.DiskAttacher, p *sandbox.Pod, c *sandbox.Container) error {
		return b.AttachDisk(ctx, p, c, d)
	})
}

// DetachDisk takes a disk away that AttachDisk has attached.
func (n *Node) DetachDisk(ctx context.Context, id, name string) error {
	return n.changeDisks(ctx, id, func(ctx context.Context, b sandbox.DiskAttacher, p *sandbox.Pod, c *sandbox.Container) error {
		return b.DetachDisk(ctx, p, c, name)
	})
}

type diskChange func(context.Context, sandbox.DiskAttacher, *sandbox.Pod, *sandbox.Container) error

// changeDisks calls the backend as an order for the container.
func (n *Node) changeDisks(ctx context.Context, id string, change diskChange) error {
	p, id, err := n.orderContainer(id)
	if err != nil {
		return err
	}
	return p.slotOf(p.keyOf(id)).run(ctx, n.order(intentUpdate), func(ctx context.Context) error {
		rec, c, state, err := p.containerState(id)
		if err != nil {
			return err
		}
		backend, ok := p.backendOf(c).(sandbox.DiskAttacher)
		if !ok {
			return fmt.Errorf("a %q container cannot get or lose disks while it runs; only disk machines (handler vm) can: %w", rec.handlerOf(c),
				errdefs.ErrNotImplemented)
		}
		if state != Running {
			return fmt.Errorf("%s: container %s is %s; only running ones get or lose disks: %w", intentUpdate, id, state,
				errdefs.ErrFailedPrecondition)
		}
		return n.attempt(intentUpdate, func() error { return change(ctx, backend, rec.sandboxPod(), c.sandboxContainer()) })
	})
}
