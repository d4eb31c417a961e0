package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// diskPrefix begins the IDs of the leases and snapshots that OpenDisk makes; labelImage is their label with the image's
// ID.
const (
	diskPrefix = "disk-"
	labelImage = "tripod.run/image"
)

// DiskFiles are an image's boot files, open for reading.
type DiskFiles struct {
	MachineImage
	// Disk, Kernel and Initrd are nil if the image has none.
	Disk, Kernel, Initrd *os.File
	// DiskPath, KernelPath and InitrdPath are paths of the same files. They exist until CloseDisk releases the image,
	// even across restarts of the daemon and the node.
	DiskPath, KernelPath, InitrdPath string
	// Cmdline is the kernel's command line from /boot/cmdline; empty if the image has none.
	Cmdline string
}

// Close closes the files; the image stays held.
func (f *DiskFiles) Close() error {
	var errs []error
	for _, file := range []*os.File{f.Disk, f.Kernel, f.Initrd} {
		if file != nil {
			errs = append(errs, file.Close())
		}
	}
	return errors.Join(errs...)
}

// OpenDisk opens an image's boot files read-only, and holds the image under key until CloseDisk, even if the image is
// removed. A repeated call opens the same files. If key holds another image, the error is errdefs.ErrAlreadyExists.
// Other errors are those of Machine.
func (s *Store) OpenDisk(ctx context.Context, key, imageID string) (*DiskFiles, error) {
	if err := s.readyFor(key); err != nil {
		return nil, err
	}
	ctx = s.withNamespace(ctx)
	if err := s.locks.Lock(ctx, diskPrefix+key); err != nil {
		return nil, err
	}
	defer s.locks.Unlock(diskPrefix + key)
	files, err := s.openDisk(ctx, key, imageID)
	if err != nil {
		return nil, fmt.Errorf("disk %q of image %s: %w", key, imageID, withClass(err))
	}
	return files, nil
}

func (s *Store) openDisk(ctx context.Context, key, imageID string) (*DiskFiles, error) {
	held, err := s.heldDisk(ctx, key)
	if err != nil {
		return nil, err
	}
	if held == "" {
		if err := s.reserve(); err != nil {
			return nil, err
		}
		if held, err = s.holdDisk(ctx, key, imageID); err != nil {
			return nil, err
		}
		files, err := s.openHeld(ctx, key, held)
		if err != nil {
			err = errors.Join(err, s.closeDisk(context.WithoutCancel(ctx), key))
		}
		return files, err
	}
	want := imageID
	if e, err := s.index.find(imageID); err == nil {
		want = e.image.ID
		e.touch()
	}
	if want != held {
		return nil, fmt.Errorf("the key holds image %s: %w", held, errdefs.ErrAlreadyExists)
	}
	return s.openHeld(ctx, key, held)
}

// heldDisk returns the ID of the image that key holds; "" if key holds no image.
func (s *Store) heldDisk(ctx context.Context, key string) (string, error) {
	info, err := s.snaps.Stat(ctx, diskPrefix+key)
	if err == nil {
		return info.Labels[labelImage], nil
	} else if !errdefs.IsNotFound(err) {
		return "", err
	}
	found, err := s.leases.List(ctx, fmt.Sprintf("id==%q", diskPrefix+key))
	if err != nil || len(found) == 0 {
		return "", err
	}
	return found[0].Labels[labelImage], nil
}

// holdDisk holds an image under key: an artifact by a lease on its manifest, and a root filesystem by a view.
func (s *Store) holdDisk(ctx context.Context, key, imageID string) (string, error) {
	e, err := s.index.find(imageID)
	if err != nil {
		return "", err
	}
	switch e.details.kind {
	case KindRootfs:
		_, err := s.makeSnapshot(ctx, diskPrefix+key, e.image.ID, ownerDisk, s.snaps.View)
		return e.image.ID, err
	case KindDisk:
	default:
		return "", invalidf("a %s has no disk", e.details.kind)
	}
	s.change.Lock() // the image must not be removed between the look-up and the lease
	defer s.change.Unlock()
	if e, err = s.index.find(e.image.ID); err != nil {
		return "", err
	}
	e.touch()
	return e.image.ID, s.transact(ctx, func(ctx context.Context) error {
		lease, err := s.leases.Create(ctx, leases.WithID(diskPrefix+key), leases.WithLabel(labelImage, e.image.ID))
		if err != nil {
			return err
		}
		return s.leases.AddResource(ctx, lease, leases.Resource{ID: e.image.Manifest.String(), Type: "content"})
	})
}

// openHeld opens the boot files of the image that key holds.
func (s *Store) openHeld(ctx context.Context, key, imageID string) (*DiskFiles, error) {
	mounts, err := s.snaps.Mounts(ctx, diskPrefix+key)
	if err == nil {
		return s.openMachine(mounts)
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

// CloseDisk releases the image that OpenDisk holds under key. It also succeeds if key holds no image.
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

// Disks lists the keys of the images that OpenDisk holds.
func (s *Store) Disks(ctx context.Context) ([]string, error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	ctx = s.withNamespace(ctx)
	var keys []string
	err := s.snaps.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if key, ok := strings.CutPrefix(info.Name, diskPrefix); ok && info.Labels[labelOwner] == ownerDisk {
			keys = append(keys, key)
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
		if key, ok := strings.CutPrefix(lease.ID, diskPrefix); ok && lease.Labels[labelImage] != "" {
			keys = append(keys, key)
		}
	}
	return keys, nil
}
