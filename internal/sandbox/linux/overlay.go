package linux

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/spans"
)

// volatile is the overlayfs mount option that keeps the kernel from syncing the upper directory, where a container's
// writes go (Linux 5.10; Documentation/filesystems/overlayfs.rst). Those writes need not be durable. Without the
// option, an unmount writes out all dirty data of the underlying file system, including other programs' data. With the
// option, the kernel marks the layer and refuses to mount it again until the mark is removed, because a crash of the
// machine makes the layer's content unreliable. See docs/adr/0027.
const volatile = "volatile"

// volatileMark is the path of the kernel's mark below an overlay's work directory.
const volatileMark = "work/incompat/volatile"

// probeVolatile mounts an overlay with "volatile" in a temporary directory below dir, and returns the error.
func probeVolatile(dir string) (err error) {
	trial := filepath.Join(dir, "overlay-trial")
	if err := os.RemoveAll(trial); err != nil { // left by a probe that was killed
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(trial)) }()
	at := func(name string) string { return filepath.Join(trial, name) }
	for _, name := range []string{"lower", "upper", "work", "merged"} {
		if err := os.MkdirAll(at(name), 0o700); err != nil {
			return err
		}
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s,%s", at("lower"), at("upper"), at("work"), volatile)
	return onNewThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return err
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		if err := unix.Mount("overlay", at("merged"), "overlay", 0, options); err != nil {
			return err
		}
		return unix.Unmount(at("merged"), 0)
	})
}

// mountLayer mounts a container's root file system unless it is mounted already. It first removes the kernel's mark.
// This is safe because the machine has not crashed since the layer was last mounted (see layerLost).
func (b *Backend) mountLayer(ctx context.Context, p *sandbox.Pod, mounts []mount.Mount, bundle string) error {
	dir := rootfsDir(bundle)
	if mountedOn(dir) {
		return continueCopy(ctx, p, bundle)
	}
	if err := os.RemoveAll(markOf(mounts)); err != nil {
		return fmt.Errorf("remove the mark of an earlier mount: %w", err)
	}
	if b.volatile {
		mounts = asVolatile(mounts)
	}
	if p.IDMap() != nil {
		return b.mountMappedLayer(ctx, p, mounts, bundle)
	}
	return mountOn(mounts, dir)
}

// asVolatile returns the mounts with the option "volatile" added to each overlay.
func asVolatile(mounts []mount.Mount) []mount.Mount {
	mounts = slices.Clone(mounts)
	for i, m := range mounts {
		if m.Type == "overlay" && !slices.Contains(m.Options, volatile) {
			mounts[i].Options = append(slices.Clone(m.Options), volatile)
		}
	}
	return mounts
}

// markOf returns the path of the kernel's mark for the overlay among the mounts, or "" if none of them is an overlay.
func markOf(mounts []mount.Mount) string {
	for _, m := range mounts {
		for _, option := range m.Options {
			if work, ok := strings.CutPrefix(option, "workdir="); ok && m.Type == "overlay" {
				return filepath.Join(work, volatileMark)
			}
		}
	}
	return ""
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
	mark := markOf(mounts)
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
