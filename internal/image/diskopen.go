package image

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/keys"
)

// diskPrefix begins the IDs of the leases and snapshots that OpenDisk and OpenRootDisk make. They have the label keys.Image, and
// the leases of OpenRootDisk also keys.RootDisk.
const diskPrefix = "disk-"

// diskUse is what a key holds of an image: the boot files for a machine, or the root disk.
type diskUse string

const (
	useNone    diskUse = ""
	useMachine diskUse = "boot files"
	useRoot    diskUse = "root disk"
)

// OpenDisk opens an image's boot files read-only, and holds the image under key until CloseDisk, even if the image is
// removed. A repeated call opens the same files. If key holds another image, or a root disk, the error is
// errdefs.ErrAlreadyExists. Other errors are those of Machine.
func (s *Store) OpenDisk(ctx context.Context, key, imageID string) (*disk.Files, error) {
	var files *disk.Files
	err := s.openAs(ctx, useMachine, key, imageID, func(ctx context.Context, held string) (err error) {
		files, err = s.openHeld(ctx, key, held)
		return err
	})
	return files, err
}

// openAs holds an image under key for a use and calls open with the image's ID. If key held nothing and open fails, key
// holds nothing afterwards.
func (s *Store) openAs(ctx context.Context, use diskUse, key, imageID string,
	open func(ctx context.Context, held string) error) (err error) {
	if err := s.readyFor(key); err != nil {
		return err
	}
	ctx = s.withNamespace(ctx)
	if err := s.locks.Lock(ctx, diskPrefix+key); err != nil {
		return err
	}
	defer s.locks.Unlock(diskPrefix + key)
	defer func() {
		if err != nil {
			err = fmt.Errorf("disk %q of image %s: %w", key, imageID, failure.WithClass(err))
		}
	}()
	held, heldAs, err := s.heldDisk(ctx, key)
	if err != nil {
		return err
	}
	if heldAs == useNone {
		if err := s.reserve(); err != nil {
			return err
		}
		if held, err = s.holdDisk(ctx, use, key, imageID); err != nil {
			return err
		}
		if err := open(ctx, held); err != nil {
			return errors.Join(err, s.closeDisk(context.WithoutCancel(ctx), key))
		}
		return nil
	}
	want := imageID
	if e, err := s.index.find(imageID); err == nil {
		want = e.image.ID
		e.touch()
	}
	if want != held || heldAs != use {
		return fmt.Errorf("the key holds the %s of image %s: %w", heldAs, held, errdefs.ErrAlreadyExists)
	}
	return open(ctx, held)
}

// heldDisk returns the ID of the image that key holds, and for which use; useNone if key holds no image.
func (s *Store) heldDisk(ctx context.Context, key string) (string, diskUse, error) {
	info, err := s.snaps.Stat(ctx, diskPrefix+key)
	if err == nil {
		return keys.Value(info.Labels, keys.Image), useMachine, nil
	} else if !errdefs.IsNotFound(err) {
		return "", useNone, err
	}
	found, err := s.leases.List(ctx, fmt.Sprintf("id==%q", diskPrefix+key))
	if err != nil || len(found) == 0 {
		return "", useNone, err
	}
	use := useMachine
	if keys.Value(found[0].Labels, keys.RootDisk) != "" {
		use = useRoot
	}
	return keys.Value(found[0].Labels, keys.Image), use, nil
}

// holdDisk holds an image under key: the boot files of a root filesystem by a view, and everything else by a lease on the
// image's manifest.
func (s *Store) holdDisk(ctx context.Context, use diskUse, key, imageID string) (string, error) {
	e, err := s.index.find(imageID)
	if err != nil {
		return "", err
	}
	labels := map[string]string{keys.Image: e.image.ID}
	switch kind := e.details.kind; {
	case use == useRoot && kind != KindRootfs:
		return "", failure.Invalidf("a %s has no root filesystem", kind)
	case use == useRoot:
		labels[keys.RootDisk] = "true"
	case kind == KindRootfs:
		_, err := s.makeSnapshot(ctx, diskPrefix+key, e.image.ID, ownerDisk, s.snaps.View)
		return e.image.ID, err
	case kind != KindDisk:
		return "", failure.Invalidf("a %s has no disk", kind)
	}
	s.change.Lock() // the image must not be removed between the look-up and the lease
	defer s.change.Unlock()
	if e, err = s.index.find(e.image.ID); err != nil {
		return "", err
	}
	e.touch()
	return e.image.ID, s.transact(ctx, func(ctx context.Context) error {
		lease, err := s.leases.Create(ctx, leases.WithID(diskPrefix+key), leases.WithLabels(labels))
		if err != nil {
			return err
		}
		return s.leases.AddResource(ctx, lease, leases.Resource{ID: e.image.Manifest.String(), Type: "content"})
	})
}

// openHeld opens the boot files of the image that key holds.
func (s *Store) openHeld(ctx context.Context, key, imageID string) (*disk.Files, error) {
	mounts, err := s.snaps.Mounts(ctx, diskPrefix+key)
	if err == nil {
		return disk.Open(s.cfg.Root, mounts)
	} else if !errdefs.IsNotFound(err) {
		return nil, err
	}
	// An artifact's ID is the digest of its manifest.
	info, err := s.content.Info(ctx, digest.Digest(imageID))
	if err != nil {
		return nil, err
	}
	d, err := s.inspect(ctx, ocispec.Descriptor{MediaType: ocispec.MediaTypeImageManifest, Digest: info.Digest, Size: info.Size})
	if err != nil {
		return nil, err
	}
	return s.openArtifact(ctx, d)
}

// CloseDisk releases the image that OpenDisk or OpenRootDisk holds under key. It also succeeds if key holds no image.
func (s *Store) CloseDisk(ctx context.Context, key string) error {
	if err := s.readyFor(key); err != nil {
		return err
	}
	ctx = s.withNamespace(ctx)
	if err := s.locks.Lock(ctx, diskPrefix+key); err != nil {
		return err
	}
	defer s.locks.Unlock(diskPrefix + key)
	if err := s.closeDisk(ctx, key); err != nil {
		return fmt.Errorf("close disk %q: %w", key, err)
	}
	return nil
}

func (s *Store) closeDisk(ctx context.Context, key string) error {
	var errs []error
	if err := s.snaps.Remove(ctx, diskPrefix+key); err != nil && !errdefs.IsNotFound(err) {
		errs = append(errs, err)
	}
	if err := s.leases.Delete(ctx, leases.Lease{ID: diskPrefix + key}); err != nil && !errdefs.IsNotFound(err) {
		errs = append(errs, err)
	}
	s.Kick()
	return errors.Join(errs...)
}

// Disks lists the keys of the images that OpenDisk and OpenRootDisk hold.
func (s *Store) Disks(ctx context.Context) ([]string, error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	ctx = s.withNamespace(ctx)
	var held []string
	err := s.snaps.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if key, ok := strings.CutPrefix(info.Name, diskPrefix); ok && keys.Value(info.Labels, keys.Owner) == ownerDisk {
			held = append(held, key)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list disks: %w", err)
	}
	all, err := s.leases.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("list disks: %w", err)
	}
	for _, lease := range all {
		if key, ok := strings.CutPrefix(lease.ID, diskPrefix); ok && keys.Value(lease.Labels, keys.Image) != "" {
			held = append(held, key)
		}
	}
	return held, nil
}
