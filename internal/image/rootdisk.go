package image

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/internal/layer"
	"github.com/tripod-run/tripod/internal/image/internal/readers"
)

var failRootDisk = failpoint.New("image.rootdisk.write")

// labelRootDisk is a label on manifests. Its value is the digest of the blob with the image's root disk. The collector
// keeps that blob as long as it keeps the manifest.
const labelRootDisk = "containerd.io/gc.ref.content.rootdisk"

// OpenRootDisk opens the root filesystem of an image as a read-only disk, uncompressed EROFS, and holds the image and
// the disk under key until CloseDisk, even if the image is removed. The first call for an image makes the disk; calls at
// the same time share that work, which ends when the last of them is cancelled. The disk has all that the image's layers
// have, with the files' times. The returned file's Name is the disk's path until CloseDisk.
//
// Errors: errdefs.ErrInvalidArgument if the image has no root filesystem, or a file name in it is too long for a disk;
// ErrNotFound for an unknown image; ErrAlreadyExists if key holds another image, or boot files of OpenDisk;
// ErrFailedPrecondition if mkfs.erofs is not installed; ErrResourceExhausted if the store's file system is full: until
// the disk is complete, making it takes twice the disk's space; context.DeadlineExceeded after an hour.
func (s *Store) OpenRootDisk(ctx context.Context, key, imageID string) (*os.File, error) {
	var disk *os.File
	err := s.openAs(ctx, useRoot, key, imageID, func(ctx context.Context, held string) error {
		manifest, err := s.heldManifest(ctx, key)
		if err != nil {
			return err
		}
		disk, err = s.openDerived(ctx, "", func() (ocispec.Descriptor, error) {
			return s.rootDisks.do(ctx, s.base, manifest.String(), nil, func(ctx context.Context, _ *tracker) (ocispec.Descriptor, error) {
				return s.rootDisk(ctx, held, manifest)
			})
		})
		return err
	})
	return disk, err
}

// heldManifest returns the manifest that key holds by a lease.
func (s *Store) heldManifest(ctx context.Context, key string) (digest.Digest, error) {
	held, err := s.leases.ListResources(ctx, leases.Lease{ID: diskPrefix + key})
	if err != nil {
		return "", err
	}
	if len(held) != 1 {
		return "", fmt.Errorf("its lease has %d resources, not one manifest: %w", len(held), errdefs.ErrDataLoss)
	}
	return digest.Digest(held[0].ID), nil
}

// rootDisk returns the blob with an image's root disk. It makes the blob if no earlier call has made it.
func (s *Store) rootDisk(ctx context.Context, imageID string, manifest digest.Digest) (desc ocispec.Descriptor, err error) {
	key := "root-disk://" + manifest.String() // a cancelled flight may still be on its way out
	if err := s.locks.Lock(ctx, key); err != nil {
		return desc, err
	}
	defer s.locks.Unlock(key)
	desc, ok, err := s.derived(ctx, manifest, labelRootDisk, disk.MediaTypeErofs)
	if ok || err != nil {
		return desc, err
	}
	program, err := disk.FindMkfs()
	if err != nil {
		return desc, err
	}
	e, err := s.index.find(imageID)
	if err != nil {
		return desc, err
	}
	start := time.Now()
	desc, err = s.makeRootDisk(ctx, program, e.details, manifest)
	if errdefs.IsNotFound(err) || failure.IsGone(err) {
		err = s.lostLayers(ctx, e)
	}
	if err == nil {
		s.cfg.Logger.InfoContext(ctx, "root disk made", "image", imageID, "digest", desc.Digest, "bytes", desc.Size, "took", time.Since(start))
	}
	return desc, err
}

// makeRootDisk makes the blob in two steps: mkfs.erofs writes a file without a name, of which nothing is left if this
// process or the node dies, and the content store copies it. The view's lease keeps the blob until the manifest's label
// refers to it.
func (s *Store) makeRootDisk(ctx context.Context, program string, d *details, manifest digest.Digest) (desc ocispec.Descriptor, err error) {
	err = s.withView(ctx, d.chainID(), func(ctx context.Context, view *rootView) error {
		made, err := os.OpenFile(filepath.Join(s.cfg.Root, "content", "ingest"), unix.O_TMPFILE|os.O_RDWR, 0o600)
		if err != nil {
			return err
		}
		defer made.Close()
		err = layer.WithRoot(s.cfg.Root, view.mounts, func(root *layer.Root) error {
			return disk.MakeErofs(ctx, program, made, root, d.id)
		})
		if err != nil {
			return err
		}
		desc, err = s.derive(ctx, manifest, labelRootDisk, "root-disk-"+manifest.String(), disk.MediaTypeErofs, func(w io.Writer) (int64, error) {
			size, err := io.Copy(w, readers.Cancel(ctx, made))
			if err == nil {
				err = failRootDisk.Hit(ctx)
			}
			return size, err
		})
		return err
	})
	return desc, err
}
