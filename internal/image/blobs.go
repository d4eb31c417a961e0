package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

type blobState int

const (
	blobAbsent blobState = iota
	blobDamaged
	blobWhole
)

// checkBlob checks that a blob has a record and that its file has the right size. A crash can truncate the file.
func (s *Store) checkBlob(ctx context.Context, desc ocispec.Descriptor) (blobState, error) {
	if _, bad := s.badBlobs.Load(desc.Digest.String()); bad {
		return blobDamaged, nil
	}
	_, err := s.content.Info(ctx, desc.Digest)
	known := err == nil
	if err != nil && !errdefs.IsNotFound(err) {
		return blobAbsent, err
	}
	file, err := s.blobs.Info(ctx, desc.Digest)
	switch {
	case errdefs.IsNotFound(err) && !known:
		return blobAbsent, nil
	case errdefs.IsNotFound(err):
		return blobDamaged, nil
	case err != nil:
		return blobAbsent, err
	case !known || file.Size != desc.Size:
		// A crash can leave a file without a record. containerd would accept the file unchecked.
		return blobDamaged, nil
	}
	return blobWhole, nil
}

// dropBlob removes a blob's record and file, so that it is fetched again.
func (s *Store) dropBlob(ctx context.Context, dgst digest.Digest) error {
	for _, store := range []content.Store{s.content, s.blobs} {
		if err := store.Delete(ctx, dgst); err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("drop blob %s: %w", dgst, err)
		}
	}
	s.badBlobs.Delete(dgst.String())
	return nil
}

// dropDamaged drops a damaged blob, so that it is fetched again.
func (s *Store) dropDamaged(ctx context.Context, desc ocispec.Descriptor) error {
	state, err := s.checkBlob(ctx, desc)
	if err != nil || state != blobDamaged {
		return err
	}
	s.cfg.Logger.WarnContext(ctx, "a stored blob is damaged and will be fetched again", "digest", desc.Digest, "size", desc.Size)
	return s.dropBlob(ctx, desc.Digest)
}

// readBlob reads a small blob and checks its digest. The error for a mismatch is a corruptError.
func (s *Store) readBlob(ctx context.Context, desc ocispec.Descriptor) ([]byte, error) {
	ra, err := s.content.ReaderAt(ctx, desc)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &failure.CorruptError{Digest: desc.Digest}
	} else if err != nil {
		return nil, err
	}
	defer ra.Close()
	if ra.Size() != desc.Size {
		return nil, &failure.CorruptError{Digest: desc.Digest}
	}
	data := make([]byte, desc.Size)
	if n, err := ra.ReadAt(data, 0); int64(n) != desc.Size {
		return nil, fmt.Errorf("read blob %s: %w", desc.Digest, err)
	}
	if desc.Digest.Algorithm().FromBytes(data) != desc.Digest {
		return nil, &failure.CorruptError{Digest: desc.Digest}
	}
	return data, nil
}

// blobPath returns a blob's path in the content store.
func (s *Store) blobPath(dgst digest.Digest) string {
	return filepath.Join(s.cfg.Root, "content", "blobs", dgst.Algorithm().String(), dgst.Encoded())
}

// OpenBlob checks a blob's size and digest and opens it for reading. The error is errdefs.ErrNotFound for a missing
// blob, and errdefs.ErrDataLoss for a damaged one. If the blob is damaged, OpenBlob drops the images that contain the
// blob, so that they are pulled again.
func (s *Store) OpenBlob(ctx context.Context, desc ocispec.Descriptor) (*os.File, error) {
	file, err := s.OpenOptionalBlob(ctx, desc)
	if corrupt, ok := errors.AsType[*failure.CorruptError](err); ok {
		return nil, s.lostBlob(s.withNamespace(ctx), corrupt.Digest)
	}
	return file, err
}

// OpenOptionalBlob is like OpenBlob for a blob that an image can do without: if it is damaged, the images that contain it
// stay, and the next pull of one of them fetches it again.
func (s *Store) OpenOptionalBlob(ctx context.Context, desc ocispec.Descriptor) (_ *os.File, err error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	ctx = s.withNamespace(ctx)
	if _, err := s.content.Info(ctx, desc.Digest); err != nil {
		return nil, fmt.Errorf("blob %s: %w", desc.Digest, err)
	}
	defer func() {
		if _, corrupt := errors.AsType[*failure.CorruptError](err); corrupt {
			s.badBlobs.Store(desc.Digest.String(), true)
		}
	}()
	file, err := os.Open(s.blobPath(desc.Digest))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &failure.CorruptError{Digest: desc.Digest}
	} else if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			file.Close()
		}
	}()
	verifier := desc.Digest.Verifier()
	n, err := io.Copy(verifier, file)
	if err != nil {
		return nil, fmt.Errorf("read blob %s: %w", desc.Digest, err)
	}
	if n != desc.Size || !verifier.Verified() {
		return nil, &failure.CorruptError{Digest: desc.Digest}
	}
	_, err = file.Seek(0, io.SeekStart)
	return file, err
}

// lostBlob drops a damaged blob and the artifacts that contain it, so that they are pulled again. A blob that was
// extracted from an entrypoint is extracted again when it is next needed.
func (s *Store) lostBlob(ctx context.Context, dgst digest.Digest) error {
	s.change.Lock()
	defer s.change.Unlock()
	for _, img := range s.index.list() {
		is := func(desc ocispec.Descriptor) bool { return desc.Digest == dgst }
		if img.Kind == KindRootfs || !slices.ContainsFunc(img.Layers, is) {
			continue
		}
		s.cfg.Logger.WarnContext(ctx, "an image has a damaged blob and must be pulled again", "image", img.ID, "digest", dgst)
		if err := s.deleteImage(ctx, img.ID); err != nil {
			return err
		}
	}
	return errors.Join(&failure.CorruptError{Digest: dgst}, s.dropBlob(ctx, dgst))
}
