package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// blobState is what there is of a blob.
type blobState int

const (
	blobAbsent blobState = iota
	blobDamaged
	blobWhole
)

// blob looks at a blob's record and at its file, by size only: a file that lost its bytes in a crash is shorter.
func (s *Store) blob(ctx context.Context, desc ocispec.Descriptor) (blobState, error) {
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
		// A file without a record was left by a crash between the two; containerd would take it unseen.
		return blobDamaged, nil
	}
	return blobWhole, nil
}

// dropBlob removes a blob's record and file, so that it can be fetched again.
func (s *Store) dropBlob(ctx context.Context, dgst digest.Digest) error {
	for _, store := range []content.Store{s.content, s.blobs} {
		if err := store.Delete(ctx, dgst); err != nil && !errdefs.IsNotFound(err) {
			return fmt.Errorf("drop blob %s: %w", dgst, err)
		}
	}
	return nil
}

// mend drops a damaged blob.
func (s *Store) mend(ctx context.Context, desc ocispec.Descriptor) error {
	state, err := s.blob(ctx, desc)
	if err != nil || state != blobDamaged {
		return err
	}
	s.cfg.Logger.WarnContext(ctx, "a stored blob is damaged and will be fetched again", "digest", desc.Digest, "size", desc.Size)
	return s.dropBlob(ctx, desc.Digest)
}

// readBlob reads a whole small blob and checks it against its digest: corruptError when it differs.
func (s *Store) readBlob(ctx context.Context, desc ocispec.Descriptor) ([]byte, error) {
	ra, err := s.content.ReaderAt(ctx, desc)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, &corruptError{desc.Digest}
	} else if err != nil {
		return nil, err
	}
	defer ra.Close()
	if ra.Size() != desc.Size {
		return nil, &corruptError{desc.Digest}
	}
	data := make([]byte, desc.Size)
	if n, err := ra.ReadAt(data, 0); int64(n) != desc.Size {
		return nil, fmt.Errorf("read blob %s: %w", desc.Digest, err)
	}
	if desc.Digest.Algorithm().FromBytes(data) != desc.Digest {
		return nil, &corruptError{desc.Digest}
	}
	return data, nil
}
