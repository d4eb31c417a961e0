package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/keys"
)

// fileNames returns the names that an artifact's blobs have in a volume: their titles (ORAS and other tools set these),
// and the digests' hexadecimal part for blobs without a title.
func fileNames(layers []ocispec.Descriptor) []string {
	names := make([]string, len(layers))
	for i, layer := range layers {
		names[i] = layer.Annotations[ocispec.AnnotationTitle]
		if names[i] == "" {
			names[i] = layer.Digest.Encoded()
		}
	}
	return names
}

// viewArtifact makes a read-only directory with an artifact's blobs as files. The files are hard links, so they take no
// space, and they stay if the image is removed. A repeated call adds what is missing after a crash.
func (s *Store) viewArtifact(ctx context.Context, key string, e *entry) ([]mount.Mount, error) {
	names := e.details.files
	for i, name := range names {
		if !fs.ValidPath(name) || name == "." || strings.Contains(name, "\x00") {
			return nil, failure.Invalidf("volume %q: image %s has a file with the title %q, which is not a path inside a directory", key, e.image.ID,
				name)
		}
		if slices.Contains(names[:i], name) {
			return nil, failure.Invalidf("volume %q: image %s has two files with the title %q", key, e.image.ID, name)
		}
	}
	mounts, err := s.artifactDir(s.withNamespace(ctx), key, e)
	if err != nil {
		return nil, fmt.Errorf("volume %q of image %s: %w", key, e.image.ID, failure.WithClass(err))
	}
	if len(mounts) != 1 || mounts[0].Type != "bind" {
		return nil, fmt.Errorf("volume %q: the snapshot has the mounts %v: %w", key, mounts, errdefs.ErrNotImplemented)
	}
	root, err := os.OpenRoot(mounts[0].Source)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	for i, layer := range e.details.layers {
		if err := s.linkBlob(ctx, layer, root, names[i]); err != nil {
			return nil, fmt.Errorf("volume %q of image %s: file %q: %w", key, e.image.ID, names[i], err)
		}
	}
	mounts[0].Options = []string{"rbind", "ro"}
	return mounts, nil
}

// artifactDir makes an empty snapshot for an artifact's files, or finds the one that exists.
func (s *Store) artifactDir(ctx context.Context, key string, e *entry) ([]mount.Mount, error) {
	if _, known := s.layer(key); known {
		return nil, fmt.Errorf("it already exists, as a container's layer: %w", errdefs.ErrAlreadyExists)
	}
	if err := s.reserve(); err != nil {
		return nil, err
	}
	own := ownLabels(ownerReadOnly)
	own[keys.Image] = e.image.ID
	mounts, err := s.snaps.Prepare(ctx, key, "", snapshots.WithLabels(own))
	if !errdefs.IsAlreadyExists(err) {
		return mounts, err
	}
	info, err := s.snaps.Stat(ctx, key)
	if err == nil && keys.Value(info.Labels, keys.Image) != e.image.ID {
		err = fmt.Errorf("it already exists, for image %s: %w", keys.Value(info.Labels, keys.Image), errdefs.ErrAlreadyExists)
	}
	if err != nil {
		return nil, err
	}
	return s.existingMounts(ctx, key, "", ownerReadOnly)
}

// linkBlob gives a blob a name below root, unless it has the name already.
func (s *Store) linkBlob(ctx context.Context, blob ocispec.Descriptor, root *os.Root, name string) error {
	state, err := s.checkBlob(s.withNamespace(ctx), blob)
	if err != nil {
		return err
	}
	if info, err := root.Lstat(name); err == nil && info.Mode().IsRegular() && info.Size() == blob.Size {
		return nil // the blob itself may be gone with its image
	}
	if state != blobWhole {
		return fmt.Errorf("blob %s is missing or damaged; pull the image again: %w", blob.Digest, errdefs.ErrNotFound)
	}
	if dir := path.Dir(name); dir != "." {
		if err := root.MkdirAll(dir, 0o755); err != nil {
			return failure.Invalidf("its directory: %v", err)
		}
	}
	if err := root.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Link(s.blobPath(blob.Digest), filepath.Join(root.Name(), name))
}
