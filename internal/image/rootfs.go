package image

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/keys"
)

// labelRoot makes a snapshot a root for the collector: the snapshot and all layers below it stay until Release.
const labelRoot = "containerd.io/gc.root"

// The values of the label keys.Owner. View, OpenDisk and foundation set it, as did Prepare in versions before foundations.
const (
	ownerWritable   = "rootfs" // of earlier versions; see writableLayers
	ownerReadOnly   = "view"
	ownerDisk       = "disk"       // see OpenDisk
	ownerFoundation = "foundation" // see writableLayers
)

// ownLabels returns the labels of a snapshot that the collector keeps.
func ownLabels(owner string) map[string]string {
	return map[string]string{keys.Owner: owner, labelRoot: time.Now().UTC().Format(time.RFC3339)}
}

// Prepare makes a writable layer over an image's root filesystem and returns its mounts for the caller to mount. The
// layer and those below it stay until Release(key), even if the image is removed. The labels are stored with the layer,
// for people. A repeated call for the same image returns the same mounts; if the key belongs to another image, the error
// is errdefs.ErrAlreadyExists.
func (s *Store) Prepare(ctx context.Context, key, imageID string, labels map[string]string) ([]mount.Mount, error) {
	if err := s.readyFor(key); err != nil {
		return nil, err
	}
	return s.makeRootfs(ctx, key, imageID, func(ctx context.Context, e *entry) ([]mount.Mount, error) {
		mounts, err := s.makeLayer(ctx, key, layerInfo{Image: e.image.ID, Chain: e.image.ChainID, Labels: labels, Dir: s.cfg.ContainersDir})
		if errors.Is(err, errSnapshot) {
			return s.existingMounts(ctx, key, e.image.ChainID, ownerWritable)
		}
		if err != nil {
			s.releaseFoundation(ctx, e.image.ChainID) // if the image was removed in the meantime
			return nil, err
		}
		s.usage.add(key)
		return mounts, nil
	})
}

// View is like Prepare, but the root filesystem is read-only. Image volumes use it. An artifact's root is a directory with
// its blobs as files.
func (s *Store) View(ctx context.Context, key, imageID string) ([]mount.Mount, error) {
	if err := s.readyFor(key); err != nil {
		return nil, err
	}
	if e, err := s.index.find(imageID); err == nil && e.details.kind != KindRootfs {
		return s.viewArtifact(ctx, key, e)
	}
	return s.makeSnapshot(ctx, key, imageID, ownerReadOnly, s.snaps.View)
}

type snapshotFunc func(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error)

// makeSnapshot makes a snapshot of an image's layers, or returns the mounts of the one that exists.
func (s *Store) makeSnapshot(ctx context.Context, key, imageID, owner string, snapshot snapshotFunc) ([]mount.Mount, error) {
	return s.makeRootfs(ctx, key, imageID, func(ctx context.Context, e *entry) ([]mount.Mount, error) {
		if _, known := s.layer(key); known {
			return nil, fmt.Errorf("it already exists, as a container's layer: %w", errdefs.ErrAlreadyExists)
		}
		own := ownLabels(owner)
		if owner == ownerDisk {
			own[keys.Image] = e.image.ID
		}
		mounts, err := snapshot(ctx, key, e.image.ChainID, snapshots.WithLabels(own))
		if errdefs.IsAlreadyExists(err) {
			return s.existingMounts(ctx, key, e.image.ChainID, owner)
		}
		if err == nil && !present(mounts) {
			if err = s.snaps.Remove(ctx, key); err == nil {
				err = errdefs.ErrNotFound
			}
		}
		return mounts, err
	})
}

// makeRootfs calls make for an image that has a root filesystem. If the image's layers are missing, make returns
// errdefs.ErrNotFound.
func (s *Store) makeRootfs(ctx context.Context, key, imageID string,
	make func(context.Context, *entry) ([]mount.Mount, error)) ([]mount.Mount, error) {
	e, err := s.index.find(imageID)
	if err != nil {
		return nil, fmt.Errorf("root filesystem %q: %w", key, err)
	}
	if e.details.kind != KindRootfs {
		return nil, failure.Invalidf("root filesystem %q: image %s is a %s and has none", key, e.image.ID, e.details.kind)
	}
	if err := s.reserve(); err != nil {
		return nil, fmt.Errorf("root filesystem %q: %w", key, err)
	}
	ctx = s.withNamespace(ctx)
	mounts, err := make(ctx, e)
	if errdefs.IsNotFound(err) || failure.IsGone(err) {
		err = s.lostLayers(ctx, e)
	}
	if err != nil {
		return nil, fmt.Errorf("root filesystem %q of image %s: %w", key, e.image.ID, failure.WithClass(err))
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
	if info.Parent != chainID || keys.Value(info.Labels, keys.Owner) != owner {
		return nil, fmt.Errorf("it already exists, for %s of %s: %w", keys.Value(info.Labels, keys.Owner), info.Parent, errdefs.ErrAlreadyExists)
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
	ctx = s.withNamespace(ctx)
	mounts, known, err := s.layerMounts(ctx, key)
	if known {
		return mounts, err
	}
	return s.snaps.Mounts(ctx, key)
}

// Release removes a snapshot that Prepare or View made. The caller must have unmounted it. Release succeeds if the
// snapshot does not exist.
func (s *Store) Release(ctx context.Context, key string) error {
	if err := s.readyFor(key); err != nil {
		return err
	}
	ctx = s.withNamespace(ctx)
	known, err := s.releaseLayer(ctx, key)
	if !known {
		if err = s.snaps.Remove(ctx, key); errdefs.IsNotFound(err) {
			err = nil
		}
		s.Kick()
	}
	if err != nil {
		return fmt.Errorf("release root filesystem %q: %w", key, err)
	}
	s.usage.forget(key)
	return nil
}

// Snapshots lists the keys of all snapshots that Prepare and View have made.
func (s *Store) Snapshots(ctx context.Context) ([]string, error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	all := slices.Collect(maps.Keys(s.layerList()))
	err := s.snaps.Walk(s.withNamespace(ctx), func(_ context.Context, info snapshots.Info) error {
		if owner := keys.Value(info.Labels, keys.Owner); owner == ownerWritable || owner == ownerReadOnly {
			all = append(all, info.Name)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list root filesystems: %w", err)
	}
	return all, nil
}

// readyFor returns the error of ready, or rejects a key that could clash with a key of the store's own snapshots, which
// are for layers, unpacks under way, and disks.
func (s *Store) readyFor(key string) error {
	if err := s.ready(); err != nil {
		return err
	}
	if key == "" || slices.ContainsFunc([]string{"sha256:", "extract-", diskPrefix, foundationPrefix, "."},
		func(p string) bool { return strings.HasPrefix(key, p) }) {
		return failure.Invalidf("root filesystem key %q is empty or reserved", key)
	}
	return nil
}
