package image

import (
	"context"
	"sync"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/transfer"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/registry"
	"github.com/tripod-run/tripod/internal/keys"
)

// rangeSize is the number of bytes of each of several requests for one blob. A pull buffers so many bytes per request.
const rangeSize = 4 << 20

// sources are the places from which one pull takes an image: the registry with its mirrors, and the node's peers.
//
//	                  with Peers.First      otherwise
//	a tag             registry, peers*      registry, peers*     * only if the registry is unavailable, and
//	a digest          peers, registry       registry, peers*       for a tag only with Peers.Tags
//	the content       peers, registry       registry, peers*
//
// Peers do not have cosign's signatures, so an image that needs them is resolved by the registry. Peers never replace a
// registry that refuses: an image that was deleted, or that a login may not pull, stays out.
type sources struct {
	// remote resolved the reference, and registry fetches from the same place, which are peers if fromPeer is set.
	remote   remotes.Resolver
	registry remotes.Fetcher
	fromPeer bool
	// ranges fetches from the registry by several requests at a time; nil if it must not.
	ranges remotes.Fetcher
	// peer returns a fetcher for the peers that answer, or nil if none does. It asks them only once.
	peer func() remotes.Fetcher
	// origin is the registry after peers have resolved a digest; nil if the registry is unavailable.
	origin remotes.Fetcher
	// hosts is what was learned about the registry and its mirrors.
	hosts *registry.Hosts
}

// resolve finds the reference's current target, at the registry or at peers.
func (p *puller) resolve(ctx context.Context, auth *registry.Auth) (ocispec.Descriptor, error) {
	defer p.tracker.Busy()()
	at, used, err := registry.Config{HostsDir: p.cfg.HostsDir, DockerConfig: p.cfg.DockerConfig,
		RefuseDowngrades: p.cfg.RefuseDowngrades}.Resolver(ctx, p.named, auth)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	p.hosts = used
	peers := sync.OnceValue(func() remotes.Resolver { return p.peers.Resolver(ctx) })
	p.peer = sync.OnceValue(func() remotes.Fetcher { return p.fetcherOf(ctx, peers()) })
	digested := digestIn(p.named) != ""
	signed := p.requires != nil && p.requires.NeedsSigstore()
	if p.cfg.Peers.First && digested && !signed {
		if target, err := p.resolveAt(ctx, peers()); err == nil {
			p.fromPeer, p.origin = true, p.fetcherOf(ctx, at)
			return target, nil
		}
	}
	target, err := p.resolveAt(ctx, at)
	if parallel, ok := at.(rangeSetter); ok && err == nil && p.cfg.RangesPerBlob > 1 {
		parallel.SetOptions(transfer.WithMaxConcurrentDownloads(p.cfg.RangesPerBlob), transfer.WithConcurrentLayerFetchBuffer(rangeSize))
		p.ranges = p.fetcherOf(ctx, at)
	}
	if !unavailable(err) || signed || !digested && !p.cfg.Peers.Tags {
		return target, err
	}
	if target, peerErr := p.resolveAt(ctx, peers()); peerErr == nil {
		p.fromPeer = true
		p.cfg.Logger.InfoContext(ctx, "the registry is unavailable; pulling from peers", "image", p.named.String(), "err", err)
		return target, nil
	}
	return ocispec.Descriptor{}, err
}

// rangeSetter is the part of containerd's resolver that sets the number and size of simultaneous requests. It applies
// to the fetchers made afterwards.
type rangeSetter interface {
	SetOptions(options ...transfer.ImageResolverOption)
}

// resolveAt asks one place, and uses it for the rest of the pull if it has the image.
func (p *puller) resolveAt(ctx context.Context, at remotes.Resolver) (ocispec.Descriptor, error) {
	if at == nil {
		return ocispec.Descriptor{}, errdefs.ErrNotFound
	}
	name, target, err := at.Resolve(ctx, p.named.String())
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	if !images.IsManifestType(target.MediaType) && !images.IsIndexType(target.MediaType) {
		return ocispec.Descriptor{}, failure.Invalidf("the registry answered with the type %q, not a manifest or an index", target.MediaType)
	}
	if err := checkDescriptor("manifest", target, p.cfg.Limits.DocumentBytes); err != nil {
		return ocispec.Descriptor{}, err
	}
	if p.registry, err = at.Fetcher(ctx, name); err != nil {
		return ocispec.Descriptor{}, err
	}
	p.remote = at
	return strip(target), nil
}

// fetcherOf returns a fetcher for the pull's repository, or nil without a resolver.
func (p *puller) fetcherOf(ctx context.Context, at remotes.Resolver) remotes.Fetcher {
	if at == nil {
		return nil
	}
	fetcher, err := at.Fetcher(ctx, p.named.String())
	if err != nil {
		return nil // the same call with the same arguments succeeded for resolve
	}
	return fetcher
}

// fetchers returns the sources of a blob in order; nil ones do not answer.
func (p *puller) fetchers(size int64) []remotes.Fetcher {
	var all []remotes.Fetcher
	if p.cfg.Peers.First && !p.fromPeer {
		all = append(all, p.peer())
	}
	if size > 2*rangeSize {
		all = append(all, p.ranges)
	}
	return append(all, p.registry, p.origin)
}

// lastResort returns the peers if the registry became unavailable during the pull; otherwise nil.
func (p *puller) lastResort(err error) remotes.Fetcher {
	if p.fromPeer || p.cfg.Peers.First || !unavailable(err) {
		return nil
	}
	return p.peer()
}

// unavailable reports whether err means that a registry cannot be reached or is overloaded.
func unavailable(err error) bool { return err != nil && errdefs.IsUnavailable(failure.WithClass(err)) }

// labels are the labels of the records of a pulled image's names.
func (p *puller) labels() map[string]string {
	if p.fromPeer || p.hosts.SentLogin() {
		return nil
	}
	return map[string]string{keys.Public: "true"}
}

// relabel updates the labels of a stored image's names after a pull that found nothing new. Peers cannot say whether
// the image needs a login, so what the registry said last remains.
func (p *puller) relabel(ctx context.Context, names []string, target ocispec.Descriptor) error {
	if p.fromPeer {
		return nil
	}
	labels := p.labels()
	for _, name := range names {
		record, err := p.records.Get(ctx, name)
		if err != nil || keys.Value(record.Labels, keys.Public) == labels[keys.Public] {
			continue // a name that is missing was never served
		}
		if err := p.writeRecord(ctx, name, target, labels); err != nil {
			return err
		}
	}
	return nil
}

// digestIn returns the digest in a reference, or "".
func digestIn(named reference.Named) digest.Digest {
	if digested, ok := named.(reference.Digested); ok {
		return digested.Digest()
	}
	return ""
}
