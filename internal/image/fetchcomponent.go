package image

import (
	"context"
	"fmt"
	"io"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/registry"
)

// Fetched is a component in memory.
type Fetched struct {
	Component
	Binary, DescriptorSet []byte            // DescriptorSet is nil if the image has no such layer
	Annotations           map[string]string // of the manifest
}

// FetchComponent fetches the component of an image from its registry, within the default Limits and without a Store. auth
// may be nil. It returns errdefs.ErrInvalidArgument for an image that is not an artifact with a component; the other errors
// are those of Store.Pull.
func FetchComponent(ctx context.Context, from registry.Config, ref string, auth *registry.Auth) (f *Fetched, err error) {
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return nil, failure.Invalidf("image reference %q: %v", ref, err)
	}
	defer func() {
		if err != nil {
			err = failure.Classify(ctx, fmt.Sprintf("fetch %q from %s", named, reference.Domain(named)), err)
		}
	}()
	resolver, _, err := from.Resolver(ctx, named, auth)
	if err != nil {
		return nil, err
	}
	name, target, err := resolver.Resolve(ctx, named.String())
	if err != nil {
		return nil, err
	}
	fetcher, err := resolver.Fetcher(ctx, name)
	if err != nil {
		return nil, err
	}
	var cfg Config
	cfg.setDefaults()
	d, err := fetchManifest(ctx, fetcher, target, cfg.Limits, 0)
	if err != nil {
		return nil, err
	}
	if d.component == nil {
		return nil, failure.Invalidf("it is no artifact with a component (kind %s)", d.kind)
	}
	f = &Fetched{Component: *d.component, Annotations: d.annotations}
	if f.Binary, err = fetchBlob(ctx, fetcher, f.Wasm); err == nil && f.Descriptors.Digest != "" {
		f.DescriptorSet, err = fetchBlob(ctx, fetcher, f.Descriptors)
	}
	return f, err
}

// fetchManifest follows indexes from target to the manifest for this platform.
func fetchManifest(ctx context.Context, fetcher remotes.Fetcher, target ocispec.Descriptor, limits Limits, depth int) (*details, error) {
	if err := checkDescriptor("manifest", target, limits.DocumentBytes); err != nil {
		return nil, err
	}
	document, err := fetchBlob(ctx, fetcher, target)
	switch {
	case err != nil:
		return nil, err
	case images.IsManifestType(target.MediaType):
		return parseManifest(target, document, limits)
	case !images.IsIndexType(target.MediaType):
		return nil, failure.Invalidf("the type %q is neither a manifest nor an index", target.MediaType)
	case depth == limits.IndexDepth:
		return nil, failure.Invalidf("more than %d nested indexes", depth)
	}
	child, err := choose(target, document, platforms.Default())
	if err != nil {
		return nil, err
	}
	return fetchManifest(ctx, fetcher, child, limits, depth+1)
}

// fetchBlob fetches a blob, whose size the caller has checked, and compares it with its digest.
func fetchBlob(ctx context.Context, fetcher remotes.Fetcher, desc ocispec.Descriptor) ([]byte, error) {
	body, err := fetcher.Fetch(ctx, desc)
	if err != nil {
		return nil, fmt.Errorf("blob %s: %w", desc.Digest, err)
	}
	defer body.Close()
	data, err := io.ReadAll(io.LimitReader(body, desc.Size+1))
	if err != nil && !wrongContent(err) {
		return nil, fmt.Errorf("blob %s: %w", desc.Digest, err)
	}
	if err != nil || int64(len(data)) != desc.Size || desc.Digest.Algorithm().FromBytes(data) != desc.Digest {
		return nil, fmt.Errorf("the registry's content is not blob %s of %d bytes: %w", desc.Digest, desc.Size, errdefs.ErrDataLoss)
	}
	return data, nil
}
