package image

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/internal/share"
	"github.com/tripod-run/tripod/internal/keys"
)

// MirrorConfig configures the mirror, which serves the store's images to peers.
type MirrorConfig share.Config

// ServeMirror starts a mirror, which serves the images of the store to peers. Close ends it.
func (s *Store) ServeMirror(ctx context.Context, cfg MirrorConfig) (*share.Mirror, error) {
	return share.Serve(ctx, sharedImages{s}, share.Config(cfg), s.cfg.Logger)
}

// sharedImages is the store as a mirror sees it.
type sharedImages struct{ *Store }

// Served returns the images that peers may read in a repository.
func (s sharedImages) Served(ctx context.Context, repository reference.Named, private bool) []share.ServedImage {
	ctx = s.withNamespace(ctx)
	var all []share.ServedImage
	for name, d := range s.index.in(repository.Name()) {
		record, err := s.records.Get(ctx, name)
		if err != nil || keys.Value(record.Labels, keys.Public) == "" && !private {
			continue
		}
		tag, _ := strings.CutPrefix(strings.TrimPrefix(name, repository.Name()), ":")
		all = append(all, share.ServedImage{Tag: tag, Target: record.Target, Manifest: d.manifest,
			Blobs: append(slices.Clone(d.layers), d.config)})
	}
	return all
}

// Blob returns the path of stored content.
func (s sharedImages) Blob(ctx context.Context, desc ocispec.Descriptor) (string, error) {
	if err := s.ready(); err != nil {
		return "", err
	}
	if state, err := s.checkBlob(s.withNamespace(ctx), desc); err != nil || state != blobWhole {
		return "", fmt.Errorf("content %s is not stored: %w", desc.Digest, errdefs.ErrNotFound)
	}
	return s.blobPath(desc.Digest), nil
}
