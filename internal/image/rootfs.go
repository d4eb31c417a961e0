package image

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
)

// labelOwner is a label on snapshots that says what they are for. Prepare, View and OpenDisk set it.
const labelOwner = "tripod.run/owner"

// labelRoot makes a snapshot a root for the collector: the snapshot and all layers below it stay until Release.
const labelRoot = "containerd.io/gc.root"

const (
	ownerWritable = "rootfs"
	ownerReadOnly = "view"
	ownerDisk     = "disk" // see OpenDisk
)

// Prepare makes a writable layer over an image's root filesystem and returns its mounts for the caller to mount. The
// layer and those below it stay until Release(key), even if the image is removed. The labels are stored with the layer
// and must not begin with "containerd.io/" or "tripod.run/". A repeated call for the same image returns the same
// mounts; if the key belongs to another image, the error is errdefs.ErrAlreadyExists.
func (s *Store) Prepare(ctx context.Context, key, imageID string, labels map[string]string) ([]mount.Mount, error) {
	if err := s.readyFor(key); err != nil {
		return nil, err
	}
	return s.makeSnapshot(ctx, key, imageID, ownerWritable, labels, s.snaps.Prepare)
}

// View is like Prepare, but the root filesystem is read-only. Image volumes use it.
func (s *Store) View(ctx context.Context, key, imageID string) ([]mount.Mount, error) {
	if err := s.readyFor(key); err != nil {
		return nil, err
	}
	return s.makeSnapshot(ctx, key, imageID, ownerReadOnly, nil, s.snaps.View)
}

type snapshotFunc func(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error)

func (s *Store) makeSnapshot(ctx context.Context, key, imageID, owner string, labels map[string]string, snapshot snapshotFunc) ([]mount.Mount, error) {
	e, err := s.index.find(imageID)
	if err != nil {
		return nil, fmt.Errorf("root filesystem %q: %w", key, err)
	}
	if e.details.kind != KindRootfs {
		return nil, invalidf("root filesystem %q: image %s is a %s and has none", key, e.image.ID, e.details.kind)
	}
	own := map[string]string{labelOwner: owner, labelRoot: time.Now().UTC().Format(time.RFC3339)}
	if owner == ownerDisk {
		own[labelImage] = e.image.ID
	}
	for label, value := range labels {
		if strings.HasPrefix(label, "containerd.io/") || strings.HasPrefix(label, "tripod.run/") {
			return nil, invalidf("root filesystem %q: the label %q is reserved", key, label)
		}
		own[label] = value
	}
	if err := s.reserve(); err != nil {
		return nil, fmt.Errorf("root filesystem %q: %w", key, err)
	}
	ctx = s.withNamespace(ctx)
	mounts, err := snapshot(ctx, key, e.image.ChainID, snapshots.WithLabels(own))
	if err == nil && !present(mounts) {
		if err = s.snaps.Remove(ctx, key); err == nil {
			err = errdefs.ErrNotFound
		}
	}
	switch {
	case errdefs.IsAlreadyExists(err):
		mounts, err = s.existingMounts(ctx, key, e.image.ChainID, owner)
	case errdefs.IsNotFound(err), isGone(err):
		err = s.lostLayers(ctx, e)
	case err == nil && owner == ownerWritable:
		s.usage.add(key)
	}
	if err != nil {
		return nil, fmt.Errorf("root filesystem %q of image %s: %w", key, e.image.ID, withClass(err))
	}
	e.touch()
	return mounts, nil
}

// existingMounts handles a repeated call: it returns the mounts of the existing snapshot.
func (s *Store) existingMounts(ctx context.Context, key, chainID, owner string) ([]mount.Mount, error) {
	info, err := s.snaps.Stat(ctx, key)
	if err != nil {
		return nil, err
	}
	if info.Parent != chainID || info.Labels[labelOwner] != owner {
		return nil, fmt.Errorf("it already exists, for %s of %s: %w", info.Labels[labelOwner], info.Parent, errdefs.ErrAlreadyExists)
	}
	return s.snaps.Mounts(ctx, key)
}

// lostLayers handles an image whose unpacked layers are missing. Either the image was just removed, or something else
// deleted its files. In the second case lostLayers drops the image, so that it is pulled again.
func (s *Store) lostLayers(ctx context.Context, e *entry) error {
	s.change.Lock()
	defer s.change.Unlock()
	if now, err := s.index.find(e.image.ID); err == nil && now.details == e.details && !s.intact(ctx, e.details) {
		s.cfg.Logger.WarnContext(ctx, "an image has lost its layers and must be pulled again", "image", e.image.ID)
		if err := s.deleteImage(ctx, e.image.ID); err != nil {
			return err
		}
	}
	return fmt.Errorf("its layers are missing; pull it again: %w", errdefs.ErrNotFound)
}

// Mounts returns the mounts of a snapshot that Prepare or View made, or errdefs.ErrNotFound.
func (s *Store) Mounts(ctx context.Context, key string) ([]mount.Mount, error) {
	if err := s.readyFor(key); err != nil {
		return nil, err
	}
	return s.snaps.Mounts(s.withNamespace(ctx), key)
}

// Release removes a snapshot that Prepare or View made. The caller must have unmounted it. Release succeeds if the
// snapshot does not exist.
func (s *Store) Release(ctx context.Context, key string) error {
	if err := s.readyFor(key); err != nil {
		return err
	}
	if err := s.snaps.Remove(s.withNamespace(ctx), key); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("release root filesystem %q: %w", key, err)
	}
	s.usage.forget(key)
	s.Kick()
	return nil
}

// Snapshots lists the keys of all snapshots that Prepare and View have made.
func (s *Store) Snapshots(ctx context.Context) ([]string, error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	var keys []string
	err := s.snaps.Walk(s.withNamespace(ctx), func(_ context.Context, info snapshots.Info) error {
		if owner := info.Labels[labelOwner]; owner != "" && owner != ownerDisk {
			keys = append(keys, info.Name)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list root filesystems: %w", err)
	}
	return keys, nil
}

// readyFor returns the error of ready, or rejects a key that could clash with a key of the store's own snapshots, which
// are for layers, unpacks under way, and disks.
func (s *Store) readyFor(key string) error {
	if err := s.ready(); err != nil {
		return err
	}
	if key == "" || strings.HasPrefix(key, "sha256:") || strings.HasPrefix(key, "extract-") || strings.HasPrefix(key, diskPrefix) {
		return invalidf("root filesystem key %q is empty or reserved", key)
	}
	return nil
}
