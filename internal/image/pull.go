package image

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"time"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// authSeed keeps logins apart in the keys of flights without saying what they are.
var authSeed = maphash.MakeSeed()

// Pull fetches an image and unpacks it, and returns once it can be used. What is there already is not fetched again,
// but the registry is always asked, so that a login that may not pull the image does not get it.
// Pulls of one reference with one login at a time are one pull; an end of ctx ends the waiting, and the pull only when
// nobody waits any more. What a pull had fetched when it ended is kept for ResumeWindow.
//
// Errors: errdefs.ErrInvalidArgument for a malformed reference and for an image that breaks the specification or a
// limit, ErrNotFound, ErrUnauthenticated and ErrPermissionDenied as the registry answered, ErrUnavailable when it
// could not be reached or stood still, ErrDataLoss when it sent something else than the digest promised,
// ErrResourceExhausted when the disk is full.
func (s *Store) Pull(ctx context.Context, ref string, opts PullOptions) (Image, error) {
	if err := s.ready(); err != nil {
		return Image{}, err
	}
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return Image{}, invalidf("image reference %q: %v", ref, err)
	}
	var auth Auth
	if opts.Auth != nil {
		auth = *opts.Auth
	}
	key := fmt.Sprintf("%s %x", named, maphash.Comparable(authSeed, auth))
	img, err := s.flights.do(ctx, s.base, key, opts.OnProgress, func(ctx context.Context, t *tracker) (Image, error) {
		var img Image
		var err error
		if name, ok := s.translated(named); ok {
			img, err = s.pullTranslated(ctx, named, name, t) // a login is for registries
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

// puller is one pull under way.
type puller struct {
	*Store
	named   reference.Named
	fetcher remotes.Fetcher
	tracker *tracker
}

func (s *Store) pull(ctx context.Context, named reference.Named, auth *Auth, t *tracker) (img Image, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, s.cfg.PullTimeout,
		fmt.Errorf("not done after %v: %w", s.cfg.PullTimeout, errdefs.ErrUnavailable))
	defer cancel()
	ctx, stop := t.watch(ctx, s.cfg.ProgressTimeout)
	defer stop()
	defer func() {
		if err != nil {
			err = classify(ctx, fmt.Sprintf("pull image %q from %s", named, reference.Domain(named)), err)
		}
	}()

	p := &puller{Store: s, named: named, tracker: t}
	target, err := p.resolve(ctx, auth)
	if err != nil {
		return Image{}, err
	}
	if img, ok := s.current(ctx, named, target); ok {
		return img, nil
	}
	start := time.Now()
	names := p.names(target)
	ctx, release, err := s.lease(ctx, names)
	if err != nil {
		return Image{}, err
	}
	// What was fetched is worth keeping when the next pull may go on with it, not when the image is bad or the disk full.
	defer func() { release(err != nil && (ctx.Err() != nil || errdefs.IsUnavailable(classOf(err)))) }()
	d, err := p.fetchAll(ctx, target)
	if err != nil {
		return Image{}, err
	}
	img, err = s.record(ctx, d, target, names, nil)
	if err == nil {
		t.finish()
		s.cfg.Logger.InfoContext(ctx, "image pulled", "image", named.String(), "id", img.ID, "bytes", img.Size, "took", time.Since(start))
	}
	return img, err
}

// resolve asks the registry what the reference means now.
func (p *puller) resolve(ctx context.Context, auth *Auth) (ocispec.Descriptor, error) {
	defer p.tracker.busy()()
	resolver, err := p.resolver(ctx, p.named, auth)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	name, target, err := resolver.Resolve(ctx, p.named.String())
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	fetcher, err := resolver.Fetcher(ctx, name)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	p.fetcher = trackedFetcher{fetcher, p.tracker}
	if !images.IsManifestType(target.MediaType) && !images.IsIndexType(target.MediaType) {
		return ocispec.Descriptor{}, invalidf("the registry answered with the type %q, which is neither a manifest nor an index", target.MediaType)
	}
	return bare(target), checkDescriptor("manifest", target, p.cfg.Limits.DocumentBytes)
}

// names are the references under which target is recorded: what was asked, and the digest it turned out to be.
func (p *puller) names(target ocispec.Descriptor) []string {
	byDigest := p.named.String()
	if _, ok := p.named.(reference.Digested); !ok {
		byDigest = reference.TrimNamed(p.named).String() + "@" + target.Digest.String()
	}
	return slices.Compact([]string{p.named.String(), byDigest})
}

// current finds the image when the reference already means target here and nothing of it is damaged.
func (s *Store) current(ctx context.Context, named reference.Named, target ocispec.Descriptor) (Image, bool) {
	record, err := s.records.Get(ctx, named.String())
	if err != nil || record.Target.Digest != target.Digest {
		return Image{}, false
	}
	e, err := s.index.find(named.String())
	if err != nil || !s.sound(ctx, e.details) {
		return Image{}, false
	}
	return e.snapshot(), true
}

// sound reports whether an image can be used as it is. The layers of a root filesystem may be gone as blobs, once
// unpacked, but must not be there damaged.
func (s *Store) sound(ctx context.Context, d *details) bool {
	dirs, err := s.snapshotDirs(ctx)
	return err == nil && s.soundIn(ctx, d, dirs)
}

// soundIn is sound, with the directories of snapshots known.
func (s *Store) soundIn(ctx context.Context, d *details, dirs snapshotDirs) bool {
	for _, desc := range []ocispec.Descriptor{d.manifest, d.config} {
		if _, err := s.readBlob(ctx, desc); err != nil {
			return false
		}
	}
	for _, layer := range d.layers {
		state, err := s.blob(ctx, layer)
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

// fetchAll brings everything of target: documents, blobs, unpacked layers.
func (p *puller) fetchAll(ctx context.Context, target ocispec.Descriptor) (*details, error) {
	d, err := p.manifest(ctx, target, 0)
	if err != nil {
		return nil, err
	}
	p.tracker.begin(d.config.Size + sizes(d.layers))
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
	bring := p.fetchLayers
	if d.kind == KindRootfs {
		bring = p.unpack
	}
	err = bring(ctx, d)
	// A layer that was stored damaged shows only when it is read. It is dropped and brought once more.
	if corrupt, ok := errors.AsType[*corruptError](err); ok {
		p.cfg.Logger.WarnContext(ctx, "a stored blob is corrupt and is fetched again", "digest", corrupt.digest)
		if err := p.dropBlob(ctx, corrupt.digest); err != nil {
			return nil, err
		}
		err = bring(ctx, d)
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

// manifest descends from target through indexes to the manifest for this node.
func (p *puller) manifest(ctx context.Context, target ocispec.Descriptor, depth int) (*details, error) {
	document, err := p.document(ctx, target)
	if err != nil {
		return nil, err
	}
	if images.IsManifestType(target.MediaType) {
		return parseManifest(target, document, p.cfg.Limits)
	}
	if depth == p.cfg.Limits.IndexDepth {
		return nil, invalidf("more than %d indexes one in another", depth)
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

// label makes parent keep its children from being collected. The keys are ours and containerd's, the values digests.
func (p *puller) label(ctx context.Context, parent ocispec.Descriptor, children ...ocispec.Descriptor) error {
	handler := images.SetChildrenLabels(p.content, func(context.Context, ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		return children, nil
	})
	_, err := handler(ctx, parent)
	return err
}

// document brings and reads a small blob.
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
		corrupt, ok := errors.AsType[*corruptError](err)
		if !ok || again {
			return data, err
		}
		if err := p.dropBlob(ctx, corrupt.digest); err != nil {
			return nil, err
		}
	}
}
