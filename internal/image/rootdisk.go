package image

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/internal/layer"
	"github.com/tripod-run/tripod/internal/image/internal/readers"
)

var failRootDisk = failpoint.New("image.rootdisk.write")

// labelRootDisk is a label on manifests. Its value is the digest of the blob with the image's root disk. The collector
// keeps that blob as long as it keeps the manifest.
const labelRootDisk = "containerd.io/gc.ref.content.rootdisk"

// mediaTypeErofs is the type of root disks. They never leave the node.
const mediaTypeErofs = "application/vnd.tripod.rootdisk.erofs"

const (
	// mkfsProgram makes root disks. It is in Debian's package mkfsPackage.
	mkfsProgram = "mkfs.erofs"
	mkfsPackage = "erofs-utils"
	// mkfsName is the longest file name in bytes that mkfs.erofs 1.5 stores. It cuts off the last byte of longer ones.
	mkfsName = 254
	// mkfsEpoch is the disk's time of creation in seconds, year 9999: mkfs.erofs cuts off the files' times there, and
	// would otherwise store the current time, so that no two disks would be equal.
	mkfsEpoch = 253402300799
)

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
	desc, ok, err := s.derived(ctx, manifest, labelRootDisk, mediaTypeErofs)
	if ok || err != nil {
		return desc, err
	}
	program, err := exec.LookPath(mkfsProgram)
	if err != nil {
		return desc, fmt.Errorf("%s is missing; install the package %s: %w", mkfsProgram, mkfsPackage, errdefs.ErrFailedPrecondition)
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
			if err := checkNames(ctx, root); err != nil {
				return err
			}
			return runMkfs(ctx, program, made, root.Path, diskUUID(d.id))
		})
		if err != nil {
			return err
		}
		desc, err = s.derive(ctx, manifest, labelRootDisk, "root-disk-"+manifest.String(), mediaTypeErofs, func(w io.Writer) (int64, error) {
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

// checkNames refuses a tree with a file name that mkfs.erofs would cut off: the disk could have the wrong file in its
// place.
func checkNames(ctx context.Context, r *layer.Root) error {
	return filepath.WalkDir(r.Path, func(path string, file fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case len(file.Name()) > mkfsName && path != r.Path:
			return failure.Invalidf("the file name %.40q… has %d bytes; %s stores at most %d", file.Name(), len(file.Name()), mkfsProgram, mkfsName)
		}
		return nil
	})
}

// diskUUID derives the UUID of an image's root disk from the image's ID (RFC 9562, version 8). The same image always
// makes the same disk in one store. Elsewhere the order of its files can differ.
func diskUUID(imageID string) string {
	b := []byte(digest.FromString(imageID).Encoded()[:32])
	b[12], b[16] = '8', "89ab"[b[16]%4]
	return fmt.Sprintf("%s-%s-%s-%s-%s", b[:8], b[8:12], b[12:16], b[16:20], b[20:])
}

// runMkfs makes the disk of the tree below root. The calling thread must be locked to the goroutine: mkfs.erofs gets
// its mounts, and is killed when the thread ends, which also happens when this process dies. The end of ctx kills it,
// too.
func runMkfs(ctx context.Context, program string, disk *os.File, root, uuid string) error {
	cmd := exec.CommandContext(ctx, program, "-d0", "--quiet", "-U"+uuid, "/proc/self/fd/3", root)
	said := &head{limit: 4 << 10}
	cmd.Dir, cmd.Stderr, cmd.ExtraFiles = "/", said, []*os.File{disk}
	cmd.Env = []string{"LC_ALL=C", "PATH=" + os.Getenv("PATH"), fmt.Sprintf("SOURCE_DATE_EPOCH=%d", mkfsEpoch)}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL}
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return mkfsError(err, said.String())
}

// mkfsError returns the error of a failed mkfs.erofs with what it has written to its standard error. A disk that fills
// up ends its last write early.
func mkfsError(err error, said string) error {
	err = fmt.Errorf("%s: %w: %q", mkfsProgram, err, strings.Join(strings.Fields(said), " "))
	for _, full := range []string{unix.ENOSPC.Error(), unix.EDQUOT.Error(), "was truncated"} {
		if strings.Contains(strings.ToLower(said), full) {
			return fmt.Errorf("%w (%w)", err, errdefs.ErrResourceExhausted)
		}
	}
	return err
}

// head keeps the first bytes that are written to it.
type head struct {
	buf   bytes.Buffer
	limit int
}

func (h *head) Write(p []byte) (int, error) {
	h.buf.Write(p[:min(len(p), h.limit-h.buf.Len())])
	return len(p), nil
}

func (h *head) String() string { return h.buf.String() }
