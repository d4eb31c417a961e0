package image

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"time"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/policy"
	"github.com/tripod-run/tripod/internal/image/registry"
	"github.com/tripod-run/tripod/internal/spans"
)

// authSeed seeds the hashes of logins, which are part of the keys of flights.
var authSeed = maphash.MakeSeed()

// Pull fetches and unpacks an image and returns once it can be used. It does not fetch stored content again, but always
// asks the registry, so that a login that lacks permission does not get the stored image. Concurrent pulls of one
// reference with one login are merged. If ctx ends, Pull returns, but the pull goes on while other callers wait for it.
// A failed pull's content is kept for ResumeWindow.
//
// Errors: errdefs.ErrInvalidArgument for a malformed reference and for an image that violates the specification or a
// limit; ErrSignature if the signature policy refuses the image; ErrNotFound, ErrUnauthenticated and ErrPermissionDenied
// as the registry answered; ErrUnavailable if the registry is unreachable or stalls; ErrDataLoss if the registry's
// content does not match the digest; ErrResourceExhausted if the disk is full.
func (s *Store) Pull(ctx context.Context, ref string, opts PullOptions) (Image, error) {
	if err := s.ready(); err != nil {
		return Image{}, err
	}
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return Image{}, failure.Invalidf("image reference %q: %v", ref, err)
	}
	var auth registry.Auth
	if opts.Auth != nil {
		auth = *opts.Auth
	}
	key := fmt.Sprintf("%s %x", named, maphash.Comparable(authSeed, auth))
	img, err := s.flights.do(ctx, spans.Follow(s.base, ctx), key, opts.OnProgress, func(ctx context.Context, t *tracker) (Image, error) {
		var img Image
		var err error
		if name, ok := s.translated(named); ok {
			img, err = s.pullTranslated(ctx, named, name, t) // logins apply only to registries
		} else {
			img, err = s.pull(ctx, named, opts.Auth, t)
		}
		if err != nil {
			s.cfg.Logger.InfoContext(ctx, "pull failed", "image", named.String(), "err", err)
		}
		return img, err
	})
	if err != nil && ctx.Err() != nil {
		return Image{}, fmt.Errorf("pull image %q: %w", ref, err)
	}
	return img, err
}

type puller struct {
	*Store
	named    reference.Named
	requires *policy.Requirements // nil without a signature policy
	sources
	tracker *tracker
}

func (s *Store) pull(ctx context.Context, named reference.Named, auth *registry.Auth, t *tracker) (img Image, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, s.cfg.PullTimeout,
		fmt.Errorf("not complete after %v: %w", s.cfg.PullTimeout, errdefs.ErrUnavailable))
	defer cancel()
	ctx, stop := t.watch(ctx, s.cfg.ProgressTimeout)
	defer stop()
	defer func() {
		if err != nil {
			err = failure.Classify(ctx, fmt.Sprintf("pull image %q from %s", named, reference.Domain(named)), err)
		}
	}()

	p := &puller{Store: s, named: named, tracker: t}
	if p.requires, err = s.requirements(named); err != nil {
		return Image{}, err
	}
	resolve, end := spans.Start(ctx, "image.resolve", spans.String("image", named.String()))
	target, err := p.resolve(resolve, auth)
	end(err)
	if err != nil {
		return Image{}, err
	}
	names := p.names(target)
	if img, ok := s.current(ctx, named, target); ok {
		if err := p.admit(ctx, target.Digest, img.Manifest); err != nil {
			return Image{}, err
		}
		return img, p.relabel(ctx, names, target)
	}
	start := time.Now()
	ctx, release, err := s.lease(ctx, names)
	if err != nil {
		return Image{}, err
	}
	// Keep the content if the next pull may resume it, but not if the image is invalid or the disk is full.
	defer func() { release(err != nil && (ctx.Err() != nil || errdefs.IsUnavailable(failure.ClassOf(err)))) }()
	d, err := p.fetchAll(ctx, target)
	if err != nil {
		return Image{}, err
	}
	img, err = s.record(ctx, d, target, names, p.labels())
	if err == nil {
		t.finish()
		s.cfg.Logger.InfoContext(ctx, "image pulled", "image", named.String(), "id", img.ID, "bytes", img.Size, "took", time.Since(start))
	}
	return img, err
}

// names returns the references to record for target: the requested reference and name@digest.
func (p *puller) names(target ocispec.Descriptor) []string {
	byDigest := p.named.String()
	if _, ok := p.named.(reference.Digested); !ok {
		byDigest = reference.TrimNamed(p.named).String() + "@" + target.Digest.String()
	}
	return slices.Compact([]string{p.named.String(), byDigest})
}

// current returns the stored image of a reference if the image is intact and the reference refers to target.
func (s *Store) current(ctx context.Context, named reference.Named, target ocispec.Descriptor) (Image, bool) {
	record, err := s.records.Get(ctx, named.String())
	if err != nil || record.Target.Digest != target.Digest {
		return Image{}, false
	}
	e, err := s.index.find(named.String())
	if err != nil || !s.intact(ctx, e.details) {
		return Image{}, false
	}
	return e.snapshot(), true
}

// intact reports whether an image can be used as stored. Once a root filesystem is unpacked, its layers' blobs may be
// missing but not damaged.
func (s *Store) intact(ctx context.Context, d *details) bool {
	dirs, err := s.snapshotDirs(ctx)
	return err == nil && s.intactIn(ctx, d, dirs)
}

// intactIn is like intact, for a caller that already has the snapshot directories.
func (s *Store) intactIn(ctx context.Context, d *details, dirs snapshotDirs) bool {
	for _, desc := range []ocispec.Descriptor{d.manifest, d.config} {
		if _, err := s.readBlob(ctx, desc); err != nil {
			return false
		}
	}
	for _, layer := range d.layers {
		state, err := s.checkBlob(ctx, layer)
		if err != nil || state == blobDamaged || state == blobAbsent && d.kind != KindRootfs {
			return false
		}
	}
	for _, chain := range d.chain {
		if s.checkLayer(ctx, dirs, chain.String()) != nil {
			return false
		}
	}
	return true
}

// fetchAll fetches the target's documents and blobs, and unpacks its layers.
func (p *puller) fetchAll(ctx context.Context, target ocispec.Descriptor) (*details, error) {
	d, err := p.manifest(ctx, target, 0)
	if err != nil {
		return nil, err
	}
	if err := p.admit(ctx, target.Digest, d.manifest.Digest); err != nil {
		return nil, err
	}
	p.tracker.Begin(d.config.Size + sizes(d.layers))
	if err := p.label(ctx, d.manifest, append([]ocispec.Descriptor{d.config}, d.layers...)...); err != nil {
		return nil, err
	}
	config, err := p.document(ctx, d.config)
	if err != nil {
		return nil, err
	}
	if err := d.setConfig(config, p.platform); err != nil {
		return nil, err
	}
	fetch := p.fetchLayers
	if d.kind == KindRootfs {
		fetch = p.unpack
	}
	err = fetch(ctx, d)
	// Damage to a stored layer shows only when the layer is read. Drop the layer and fetch it once more.
	if corrupt, ok := errors.AsType[*failure.CorruptError](err); ok {
		p.cfg.Logger.WarnContext(ctx, "a stored blob is corrupt; fetching it again", "digest", corrupt.Digest)
		if err := p.dropBlob(ctx, corrupt.Digest); err != nil {
			return nil, err
		}
		err = fetch(ctx, d)
	}
	if err == nil {
		err = p.checkArtifact(ctx, d)
	}
	return d, err
}

func sizes(descs []ocispec.Descriptor) (sum int64) {
	for _, d := range descs {
		sum += d.Size
	}
	return sum
}

// manifest follows indexes from target to the manifest for this node.
func (p *puller) manifest(ctx context.Context, target ocispec.Descriptor, depth int) (*details, error) {
	document, err := p.document(ctx, target)
	if err != nil {
		return nil, err
	}
	if images.IsManifestType(target.MediaType) {
		return parseManifest(target, document, p.cfg.Limits)
	}
	if depth == p.cfg.Limits.IndexDepth {
		return nil, failure.Invalidf("more than %d nested indexes", depth)
	}
	child, err := choose(target, document, p.platform)
	if err != nil {
		return nil, err
	}
	if err := checkDescriptor("manifest", child, p.cfg.Limits.DocumentBytes); err != nil {
		return nil, err
	}
	if err := p.label(ctx, target, child); err != nil {
		return nil, err
	}
	return p.manifest(ctx, child, depth+1)
}

// label makes the collector keep the children as long as it keeps the parent. The labels carry no text from the image:
// their keys are containerd's, and their values are digests.
func (p *puller) label(ctx context.Context, parent ocispec.Descriptor, children ...ocispec.Descriptor) error {
	handler := images.SetChildrenLabels(p.content, func(context.Context, ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		return children, nil
	})
	_, err := handler(ctx, parent)
	return err
}

// document fetches and reads a small blob.
func (p *puller) document(ctx context.Context, desc ocispec.Descriptor) ([]byte, error) {
	unlock, err := p.lockBlob(ctx, desc)
	if err != nil {
		return nil, err
	}
	defer unlock()
	for again := false; ; again = true {
		if err := p.fetch(ctx, desc); err != nil {
			return nil, err
		}
		data, err := p.readBlob(ctx, desc)
		corrupt, ok := errors.AsType[*failure.CorruptError](err)
		if !ok || again {
			return data, err
		}
		if err := p.dropBlob(ctx, corrupt.Digest); err != nil {
			return nil, err
		}
	}
}
