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
)

// labelComponent, on a manifest, names the blob that was made of the image's entrypoint; the collector keeps the blob
// for as long as the manifest.
const labelComponent = "containerd.io/gc.ref.content.component"

// ComponentBlob tells which blob is the binary of an image's component; OpenBlob reads it. The entrypoint of a container
// image is made a blob when it is first asked for. An image without a component is errdefs.ErrInvalidArgument, and so
// is an entrypoint that is not a regular file of at most Limits.ComponentBytes below the image's root.
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
		return ocispec.Descriptor{}, invalidf("image %s is a %s without a component: its entrypoint does not end in .wasm", e.image.ID, e.details.kind)
	}
	e.touch()
	if c.Layout != LayoutRootfs {
		return c.Wasm, nil
	}
	desc, err := s.entrypoint(s.with(ctx), e.details)
	if err != nil {
		return desc, fmt.Errorf("entrypoint %s of image %s: %w", c.Entrypoint, e.image.ID, err)
	}
	return desc, nil
}

// entrypoint finds the blob of an earlier call, or makes it.
func (s *Store) entrypoint(ctx context.Context, d *details) (ocispec.Descriptor, error) {
	key := "component://" + d.manifest.Digest.String()
	if err := s.once.Lock(ctx, key); err != nil {
		return ocispec.Descriptor{}, err
	}
	defer s.once.Unlock(key)
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

// extract copies the entrypoint out of the unpacked layers into a blob, which the view's lease keeps until the manifest's
// label refers to it.
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
		if err := s.mend(ctx, desc); err != nil {
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

// describe checks what was opened, digests it, and leaves it at its beginning.
func (s *Store) describe(file *os.File) (ocispec.Descriptor, error) {
	info, err := file.Stat()
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	if !info.Mode().IsRegular() {
		return ocispec.Descriptor{}, invalidf("it is not a regular file but %s", info.Mode())
	}
	desc := ocispec.Descriptor{MediaType: MediaTypeWasm, Size: info.Size()}
	if limit := s.cfg.Limits.ComponentBytes; desc.Size == 0 || desc.Size > limit {
		return ocispec.Descriptor{}, invalidf("it has %d bytes, where 1 to %d may be", desc.Size, limit)
	}
	if _, err := wasmbin.Read(file, desc.Size); err != nil {
		return ocispec.Descriptor{}, err
	}
	if desc.Digest, err = digest.FromReader(io.NewSectionReader(file, 0, desc.Size)); err != nil {
		return ocispec.Descriptor{}, err
	}
	return desc, nil
}
