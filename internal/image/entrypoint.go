package image

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// labelComponent is a label on manifests. Its value is the digest of the blob that was extracted from the image's
// entrypoint. The collector keeps that blob as long as it keeps the manifest.
const labelComponent = "containerd.io/gc.ref.content.component"

// ComponentBlob returns the blob with the binary of an image's component; OpenBlob reads it. A container image's
// entrypoint becomes a blob when it is first needed. errdefs.ErrInvalidArgument means that the image has no component,
// or that the entrypoint is not a regular file of at most Limits.ComponentBytes inside the image's root.
func (s *Store) ComponentBlob(ctx context.Context, imageID string) (ocispec.Descriptor, error) {
	if err := s.ready(); err != nil {
		return ocispec.Descriptor{}, err
	}
	e, err := s.index.find(imageID)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	c := e.details.component
	if c == nil {
		return ocispec.Descriptor{},
			failure.Invalidf("image %s (%s) has no component: its entrypoint does not end in .wasm", e.image.ID, e.details.kind)
	}
	e.touch()
	if c.Layout != LayoutRootfs {
		return c.Wasm, nil
	}
	desc, err := s.entrypoint(s.withNamespace(ctx), e.details)
	if err != nil {
		return desc, fmt.Errorf("entrypoint %s of image %s: %w", c.Entrypoint, e.image.ID, err)
	}
	return desc, nil
}

// entrypoint returns the blob with the entrypoint's content. It makes the blob if no earlier call has made it.
func (s *Store) entrypoint(ctx context.Context, d *details) (ocispec.Descriptor, error) {
	key := "component://" + d.manifest.Digest.String()
	if err := s.locks.Lock(ctx, key); err != nil {
		return ocispec.Descriptor{}, err
	}
	defer s.locks.Unlock(key)
	manifest, err := s.content.Info(ctx, d.manifest.Digest)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	if dgst := digest.Digest(manifest.Labels[labelComponent]); dgst != "" {
		info, err := s.blobs.Info(ctx, dgst)
		if err == nil {
			return ocispec.Descriptor{MediaType: MediaTypeWasm, Digest: dgst, Size: info.Size}, nil
		} else if !errdefs.IsNotFound(err) {
			return ocispec.Descriptor{}, err
		}
	}
	return s.extract(ctx, d)
}

// extract copies the entrypoint from the unpacked layers into a blob. The view's lease keeps the blob until the
// manifest's label refers to it.
func (s *Store) extract(ctx context.Context, d *details) (desc ocispec.Descriptor, err error) {
	err = s.withView(ctx, d.chainID(), func(ctx context.Context, view *rootView) error {
		file, err := s.openIn(view.mounts, d.component.Entrypoint)
		if err != nil {
			return err
		}
		defer file.Close()
		if desc, err = s.describe(file); err != nil {
			return err
		}
		if err := s.dropDamaged(ctx, desc); err != nil {
			return err
		}
		if err := content.WriteBlob(ctx, s.content, view.id, file, desc); err != nil {
			return err
		}
		_, err = s.content.Update(ctx, content.Info{Digest: d.manifest.Digest, Labels: map[string]string{labelComponent: desc.Digest.String()}},
			"labels."+labelComponent)
		return err
	})
	return desc, err
}

// describe checks an open file and computes its digest. It does not move the file's offset.
func (s *Store) describe(file *os.File) (ocispec.Descriptor, error) {
	info, err := file.Stat()
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	if !info.Mode().IsRegular() {
		return ocispec.Descriptor{}, failure.Invalidf("it is not a regular file but %s", info.Mode())
	}
	desc := ocispec.Descriptor{MediaType: MediaTypeWasm, Size: info.Size()}
	if limit := s.cfg.Limits.ComponentBytes; desc.Size == 0 || desc.Size > limit {
		return ocispec.Descriptor{}, failure.Invalidf("its size is %d bytes, not 1 to %d", desc.Size, limit)
	}
	if _, err := wasmbin.Read(file, desc.Size); err != nil {
		return ocispec.Descriptor{}, err
	}
	if desc.Digest, err = digest.FromReader(io.NewSectionReader(file, 0, desc.Size)); err != nil {
		return ocispec.Descriptor{}, err
	}
	return desc, nil
}
