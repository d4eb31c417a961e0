package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/mount"

	"github.com/tripod-run/tripod/internal/image/internal/layer"
)

// rootView is a temporary view of an unpacked image.
type rootView struct {
	id     string
	mounts []mount.Mount
}

// viewLease is how long the lease of a view lasts after a crash.
const viewLease = time.Hour

// withView calls fn with a view of an unpacked image and removes the view afterwards. fn's context has a lease, which
// keeps the view and the blobs that fn makes, and ends before the lease expires: without it, the image's files could go
// while fn reads them. After a crash the lease expires.
func (s *Store) withView(ctx context.Context, chainID string, fn func(context.Context, *rootView) error) (err error) {
	lease, err := s.leases.Create(ctx, leases.WithRandomID(), leases.WithExpiration(viewLease))
	if err != nil {
		return err
	}
	clean := context.WithoutCancel(ctx)
	defer func() { err = errors.Join(err, s.leases.Delete(clean, lease)) }()
	ctx, cancel := context.WithTimeoutCause(leases.WithLease(ctx, lease.ID), viewLease-time.Minute,
		fmt.Errorf("it takes longer than %v: %w", viewLease, context.DeadlineExceeded))
	defer cancel()
	view := &rootView{id: "extract-component-" + lease.ID}
	if view.mounts, err = s.snaps.View(ctx, view.id, chainID); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.snaps.Remove(clean, view.id)) }()
	return fn(ctx, view)
}

// openIn is like layer.Root.Open, for a view's mounts.
func (s *Store) openIn(mounts []mount.Mount, name string) (file *os.File, err error) {
	err = layer.WithRoot(s.cfg.Root, mounts, func(root *layer.Root) error {
		file, err = root.Open(name, 0)
		return err
	})
	return file, err
}
