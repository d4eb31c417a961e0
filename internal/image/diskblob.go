package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

var failDiskUnpack = failpoint.New("image.disk.unpack")

// labelDisk is a label on manifests. Its value is the digest of the blob with the artifact's unpacked disk. The
// collector keeps that blob as long as it keeps the manifest.
const labelDisk = "containerd.io/gc.ref.content.disk"

// verified remembers which files matched their digests, so that a large disk is not read again for every machine. If a
// file changes, its entry becomes invalid.
type verified struct {
	mu    sync.Mutex
	files map[digest.Digest]fileIdentity
}

type fileIdentity struct {
	inode   uint64
	size    int64
	changed syscall.Timespec // ctime, which cannot be set back
}

func identityOf(file *os.File) (fileIdentity, error) {
	var stat syscall.Stat_t
	if err := syscall.Fstat(int(file.Fd()), &stat); err != nil {
		return fileIdentity{}, err
	}
	return fileIdentity{stat.Ino, stat.Size, stat.Ctim}, nil
}

// open opens a blob's file. It returns nil if the file has changed since it was verified, or if it was never verified.
func (v *verified) open(path string, dgst digest.Digest) *os.File {
	v.mu.Lock()
	known, ok := v.files[dgst]
	v.mu.Unlock()
	if !ok {
		return nil
	}
	file, err := os.Open(path)
	if err != nil {
		return nil
	}
	if now, err := identityOf(file); err != nil || now != known {
		file.Close()
		return nil
	}
	return file
}

func (v *verified) add(file *os.File, dgst digest.Digest) {
	is, err := identityOf(file)
	if err != nil {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.files == nil {
		v.files = map[digest.Digest]fileIdentity{}
	}
	v.files[dgst] = is
}

// openVerified is like OpenBlob, but does not read an unchanged file again. The returned file's Name is the blob's path
// in the content store.
func (s *Store) openVerified(ctx context.Context, desc ocispec.Descriptor) (*os.File, error) {
	path := s.blobPath(desc.Digest)
	if file := s.verified.open(path, desc.Digest); file != nil {
		return file, nil
	}
	key := "verify://" + desc.Digest.String()
	if err := s.locks.Lock(ctx, key); err != nil {
		return nil, err
	}
	defer s.locks.Unlock(key)
	if file := s.verified.open(path, desc.Digest); file != nil {
		return file, nil
	}
	file, err := s.OpenBlob(ctx, desc)
	if err == nil {
		s.verified.add(file, desc.Digest)
	}
	return file, err
}

// openPlainDisk opens the disk of an artifact, decompressed. It rebuilds a damaged decompressed disk.
func (s *Store) openPlainDisk(ctx context.Context, d *details) (*os.File, error) {
	return s.openDerived(ctx, d.disk.Digest, func() (ocispec.Descriptor, error) { return s.plainDisk(ctx, d) })
}

// openDerived opens the blob that derive returns. If it is damaged, openDerived drops it and calls derive again, once,
// unless the blob is the source from which derive would make it.
func (s *Store) openDerived(ctx context.Context, source digest.Digest, derive func() (ocispec.Descriptor, error)) (*os.File, error) {
	for again := false; ; again = true {
		desc, err := derive()
		if err != nil {
			return nil, err
		}
		file, err := s.openVerified(ctx, desc)
		if corrupt, ok := errors.AsType[*failure.CorruptError](err); ok && !again && corrupt.Digest != source {
			continue
		}
		return file, err
	}
}

// derived returns the blob to which a label of a manifest refers. ok is false if the blob has not been made, or was
// dropped.
func (s *Store) derived(ctx context.Context, manifest digest.Digest,
	label, mediaType string) (desc ocispec.Descriptor, ok bool, err error) {
	labelled, err := s.content.Info(ctx, manifest)
	if err != nil {
		return desc, false, err
	}
	dgst := digest.Digest(labelled.Labels[label])
	if dgst == "" {
		return desc, false, nil
	}
	info, err := s.content.Info(ctx, dgst)
	if errdefs.IsNotFound(err) {
		return desc, false, nil
	}
	return ocispec.Descriptor{MediaType: mediaType, Digest: dgst, Size: info.Size}, err == nil, err
}

// plainDisk returns the blob with the decompressed disk. The first call makes that blob.
func (s *Store) plainDisk(ctx context.Context, d *details) (ocispec.Descriptor, error) {
	if d.disk.Compression == "" {
		return d.disk.Descriptor, nil
	}
	key := "disk://" + d.disk.Digest.String() // two artifacts can share a layer
	if err := s.locks.Lock(ctx, key); err != nil {
		return ocispec.Descriptor{}, err
	}
	defer s.locks.Unlock(key)
	desc, ok, err := s.derived(ctx, d.manifest.Digest, labelDisk, disk.MediaType(d.disk.Format, ""))
	if ok || err != nil {
		return desc, err
	}
	desc, err = s.unpackDisk(ctx, d)
	if err != nil {
		return desc, fmt.Errorf("unpack the disk %s: %w", d.disk.Digest, err)
	}
	return desc, nil
}

// unpackDisk decompresses a layer into a blob.
func (s *Store) unpackDisk(ctx context.Context, d *details) (desc ocispec.Descriptor, err error) {
	lease, err := s.leases.Create(ctx, leases.WithRandomID(), leases.WithExpiration(24*time.Hour))
	if err != nil {
		return desc, err
	}
	defer func() { err = errors.Join(err, s.leases.Delete(context.WithoutCancel(ctx), lease)) }()
	ctx = leases.WithLease(ctx, lease.ID)
	return s.derive(ctx, d.manifest.Digest, labelDisk, "disk-"+d.disk.Digest.String(), disk.MediaType(d.disk.Format, ""),
		func(w io.Writer) (int64, error) {
			size, err := s.decompressDisk(ctx, d.disk, w)
			if err == nil {
				err = failDiskUnpack.Hit(ctx)
			}
			return size, err
		})
}

// derive makes a blob of what fill writes, and makes the manifest's label refer to it. Calls with the same ref must not
// be concurrent. The lease of ctx keeps the blob until the label does. After a crash derive starts over, because the
// data on disk may be incomplete (fault V4). After an error nothing is left.
func (s *Store) derive(ctx context.Context, manifest digest.Digest, label, ref, mediaType string,
	fill func(io.Writer) (int64, error)) (desc ocispec.Descriptor, err error) {
	w, err := s.content.Writer(ctx, content.WithRef(ref))
	if err != nil {
		return desc, err
	}
	defer func() {
		closeErr := w.Close()
		if err == nil {
			return
		}
		abortErr := s.content.Abort(context.WithoutCancel(ctx), ref)
		if errdefs.IsNotFound(abortErr) {
			abortErr = nil
		}
		err = errors.Join(err, closeErr, abortErr)
	}()
	if err := w.Truncate(0); err != nil {
		return desc, err
	}
	finder := disk.NewHoleFinder(w)
	size, err := fill(finder)
	if err != nil {
		return desc, err
	}
	desc = ocispec.Descriptor{MediaType: mediaType, Digest: w.Digest(), Size: size}
	if err := s.commitBlob(ctx, w, desc); err != nil {
		return desc, err
	}
	if err := finder.Punch(ctx, s.blobPath(desc.Digest)); err != nil {
		s.cfg.Logger.WarnContext(ctx, "cannot punch holes in a disk, which now takes more space than necessary", "digest", desc.Digest, "err",
			err)
	}
	_, err = s.content.Update(ctx, content.Info{Digest: manifest, Labels: map[string]string{label: desc.Digest.String()}}, "labels."+label)
	return desc, err
}

// commitBlob turns the written content into a blob. If the store has a damaged blob with the same digest, the new blob
// replaces it.
func (s *Store) commitBlob(ctx context.Context, w content.Writer, desc ocispec.Descriptor) error {
	unlock, err := s.lockBlob(ctx, desc)
	if err != nil {
		return err
	}
	defer unlock()
	if err := s.dropDamaged(ctx, desc); err != nil {
		return err
	}
	if err := w.Commit(ctx, desc.Size, desc.Digest); err != nil && !errdefs.IsAlreadyExists(err) {
		return err
	}
	return nil
}

// decompressDisk writes a layer's decompressed content to w and returns its size.
func (s *Store) decompressDisk(ctx context.Context, layer *disk.Layer, w io.Writer) (int64, error) {
	ra, err := s.content.ReaderAt(ctx, layer.Descriptor)
	if err != nil {
		return 0, err
	}
	defer ra.Close()
	return layer.Unpack(ctx, content.NewReader(ra), w, s.cfg.Limits.UnpackedBytes)
}
