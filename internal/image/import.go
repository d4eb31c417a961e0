package image

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/distribution/reference"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// LocalPrefix begins the names of images made from files on this node.
const LocalPrefix = "edge.local/"

// IsLocal reports whether ref names an image made from a file on this node.
func IsLocal(ref string) bool { return strings.HasPrefix(ref, LocalPrefix) }

// Import stores a local artifact under a name, as a pull of that name would: it does not write intact content again,
// and it takes the name away from any other image. Remove deletes the artifact.
//
// Errors: errdefs.ErrInvalidArgument for a malformed reference or an invalid artifact, ErrSignature if the signature policy
// does not accept unsigned images of this name, ErrResourceExhausted if the disk
// is full.
func (s *Store) Import(ctx context.Context, ref string, manifest Blob, blobs ...Blob) (_ Image, err error) {
	if err := s.ready(); err != nil {
		return Image{}, err
	}
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return Image{}, failure.Invalidf("image reference %q: %v", ref, err)
	}
	ctx = s.withNamespace(ctx)
	defer func() {
		if err != nil {
			err = failure.Classify(ctx, fmt.Sprintf("import image %q", named), err)
		}
	}()
	if err := s.admitUnsigned(named); err != nil {
		return Image{}, err
	}
	target := strip(manifest.Descriptor)
	if img, ok := s.current(ctx, named, target); ok {
		return img, nil
	}
	d, err := parseManifest(target, manifest.Data, s.cfg.Limits)
	if err != nil {
		return Image{}, err
	}
	start := time.Now()
	p := &puller{Store: s, named: named}
	names := p.names(target)
	ctx, release, err := s.lease(ctx, names)
	if err != nil {
		return Image{}, err
	}
	defer release(false)
	for _, blob := range append(blobs[:len(blobs):len(blobs)], manifest) {
		if err := p.put(ctx, blob); err != nil {
			return Image{}, fmt.Errorf("%s %s: %w", blob.MediaType, blob.Digest, err)
		}
	}
	if err := p.label(ctx, target, append(d.layers[:len(d.layers):len(d.layers)], d.config)...); err != nil {
		return Image{}, err
	}
	config, err := s.readBlob(ctx, d.config)
	if err != nil {
		return Image{}, err
	}
	if err := d.setConfig(config, s.platform); err != nil {
		return Image{}, err
	}
	if err := p.checkArtifact(ctx, d); err != nil {
		return Image{}, err
	}
	img, err := s.record(ctx, d, target, names, nil)
	if err == nil {
		s.cfg.Logger.InfoContext(ctx, "image imported", "image", named.String(), "id", img.ID, "bytes", img.Size, "took", time.Since(start))
	}
	return img, err
}

// put stores a blob from memory. If the blob is stored already, put adds it to the lease.
func (p *puller) put(ctx context.Context, blob Blob) error {
	unlock, err := p.lockBlob(ctx, blob.Descriptor)
	if err != nil {
		return err
	}
	defer unlock()
	if err := p.dropDamaged(ctx, blob.Descriptor); err != nil {
		return err
	}
	return content.WriteBlob(ctx, p.content, "import-"+blob.Digest.String(), bytes.NewReader(blob.Data), blob.Descriptor)
}
