package linux

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/shared"
	"github.com/tripod-run/tripod/internal/spans"
)

// mountLayer mounts a container's root file system unless it is mounted already. It first removes the kernel's mark.
// This is safe because the machine has not crashed since the layer was last mounted (see layerLost).
func (b *Backend) mountLayer(ctx context.Context, p *sandbox.Pod, mounts []mount.Mount, bundle string) error {
	dir := rootfsDir(bundle)
	if mnt.IsMounted(dir) {
		if p.IDMap() == nil {
			return nil
		}
		return mappedLayerOf(p, bundle).ContinueCopy(ctx)
	}
	if err := os.RemoveAll(mnt.VolatileMark(mounts)); err != nil {
		return fmt.Errorf("remove the mark of an earlier mount: %w", err)
	}
	if b.volatile {
		mounts = mnt.WithVolatile(mounts)
	}
	if p.IDMap() != nil {
		users, err := shared.OpenUsers(p, b.cfg.podRunDir(p.ID))
		if err != nil {
			return err
		}
		defer users.Close()
		return mappedLayerOf(p, bundle).Mount(ctx, mounts, users, b.log.With("pod", p.ID))
	}
	return mnt.Mount(mounts, dir)
}

// mappedLayerOf returns the layer of a container in a pod with a user namespace.
func mappedLayerOf(p *sandbox.Pod, bundle string) mnt.MappedLayer {
	return mnt.MappedLayer{Dir: rootfsDir(bundle), Marks: bundle, IDs: *p.IDMap()}
}

// layerLost reports whether a container's layer is unreliable. That is so if the layer was mounted with "volatile" when
// the machine went down, or if renewLayer was interrupted.
func (b *Backend) layerLost(ctx context.Context, h *handle) (bool, error) {
	s, _ := h.Snapshot()
	if s.BootID == bootID() {
		return false, nil
	}
	mounts, err := b.images.Mounts(ctx, snapshotPrefix+h.ID)
	if errdefs.IsNotFound(err) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	mark := mnt.VolatileMark(mounts)
	if mark == "" {
		return false, nil
	}
	if _, err := os.Lstat(mark); !errors.Is(err, fs.ErrNotExist) {
		return err == nil, err
	}
	return false, nil
}

// renewLayer replaces a lost layer with an empty layer over the container's image, mounts it and rebuilds the
// specification. The caller records the boot ID.
func (b *Backend) renewLayer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, h *handle) (*specs.Spec, error) {
	b.log.Warn("the container's layer was not synced before the node went down; starting from the image", "container", c.ID)
	if err := b.unmountAll(p.ID, c.ID); err != nil {
		return nil, err
	}
	if err := b.images.Release(ctx, snapshotPrefix+c.ID); err != nil && !errdefs.IsNotFound(err) {
		return nil, err
	}
	if err := b.prepareLayer(ctx, p, c); err != nil {
		return nil, err
	}
	config, _, err := b.build(ctx, p, c)
	return config, err
}

// prepareLayer creates the container's writable layer.
func (b *Backend) prepareLayer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (err error) {
	ctx, end := spans.Start(ctx, "layer.prepare")
	defer func() { end(err) }()
	if _, err := b.images.Prepare(ctx, snapshotPrefix+c.ID, c.ImageID, map[string]string{"pod": p.ID}); err != nil {
		return fmt.Errorf("root file system of image %s: %w", c.ImageID, err)
	}
	return nil
}

// expose lets a container in a user namespace reach its root file system and volumes (see mnt.Expose).
func (b *Backend) expose(p *sandbox.Pod, id string, config *specs.Spec) error {
	run := b.cfg.podRunDir(p.ID)
	users, err := shared.OpenUsers(p, run)
	if err != nil {
		return err
	}
	defer users.Close()
	return mnt.Expose(config, run, id, users)
}

// exposed reports whether a container has all its clones, if it needs any.
func (b *Backend) exposed(p *sandbox.Pod, id string) bool {
	return p.IDMap() == nil || mnt.Exposed(b.cfg.podRunDir(p.ID), id)
}
