package wasm

import (
	"context"
	"net"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/launch"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workers"
	"github.com/tripod-run/tripod/internal/stream"
)

// Attach implements sandbox.Attacher. A read of req.Stdin can still be pending after Attach has returned.
func (b *Backend) Attach(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, req sandbox.AttachRequest) error {
	_, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return err
	}
	return attach(ctx, l.worker.Conn(), c.ID, c.Config.GetStdin(), req)
}

func attach(ctx context.Context, worker *workerapi.Client, id string, stdin bool, req sandbox.AttachRequest) error {
	io := workerapi.AttachIO{Stdout: req.Stdout, Stderr: req.Stderr}
	if stdin {
		io.Stdin = req.Stdin
	}
	return asNotRunning(worker.Attach(ctx, id, io), id)
}

// ReopenLog implements sandbox.LogReopener.
func (b *Backend) ReopenLog(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	_, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return err
	}
	file, err := stream.OpenLogFile(p.Config.GetLogDirectory(), c.Config.GetLogPath())
	if err != nil || file == nil {
		return err
	}
	defer file.Close()
	return asNotRunning(l.worker.Conn().ReopenLog(ctx, c.ID, file), c.ID)
}

// asNotRunning replaces a worker's ErrNotFound with notRunning, because a container that is unknown to its worker has
// ended.
func asNotRunning(err error, id string) error {
	if errdefs.IsNotFound(err) {
		return &notRunning{id}
	}
	return err
}

type notRunning struct{ id string }

func (e *notRunning) Error() string { return "container " + e.id + " has ended" }
func (e *notRunning) Unwrap() error { return errdefs.ErrFailedPrecondition }

// UpdateContainer implements sandbox.Updater. A container that is not running gets its limits when it starts.
func (b *Backend) UpdateContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	h, err := b.ledger.Get(p.ID, c.ID)
	if err != nil {
		return err
	}
	if _, l := h.Snapshot(); l != nil {
		if err := b.keeper.Limit(l.worker, p, c); err != nil {
			return err
		}
		resources := resourcesOf(p, c)
		if err := asNotRunning(l.worker.Conn().Update(ctx, workerapi.Update{ID: c.ID, Resources: &resources}), c.ID); err != nil {
			return err
		}
		l.memory.Store(workers.MemoryLimit(p, c))
	}
	return fpUpdated.Hit(ctx)
}

// dialData connects to the data socket of a running container's worker. The socket serves cleartext HTTP/2. Each
// request names its container in the header workerapi.HeaderContainer.
func (b *Backend) dialData(ctx context.Context, containerID string) (net.Conn, error) {
	_, l, err := b.ledger.GetRun(containerID, containerID)
	if err != nil {
		return nil, err
	}
	return l.worker.Dial(ctx, launch.DataSocket)
}
