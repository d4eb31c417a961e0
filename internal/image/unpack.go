package image

import (
	"context"
	"fmt"
	"os"
	"slices"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/unpack"
	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
)

var (
	failUnpack = failpoint.New("image.pull.unpack")
	failSync   = failpoint.New("image.pull.sync")
)

// unpack fetches the layers of a root filesystem and unpacks each as soon as it and those below are present. It does not
// fetch layers that another image has unpacked.
func (p *puller) unpack(ctx context.Context, d *details) error {
	if err := failUnpack.Hit(ctx); err != nil {
		return err
	}
	for _, layer := range d.layers {
		if err := p.mendLayer(ctx, layer); err != nil {
			return err
		}
	}
	if err := p.mendLayers(ctx, d); err != nil {
		return err
	}
	u, err := unpack.NewUnpacker(ctx, p.content,
		unpack.WithUnpackPlatform(unpack.Platform{
			// The platform was chosen with the manifest; accept any here.
			Platform:       platforms.All,
			SnapshotterKey: snapshotter,
			Snapshotter:    p.snaps,
			Applier:        newLayerApplier(p, d),
			ConfigType:     d.config.MediaType,
		}),
		unpack.WithLimiter(semaphore.NewWeighted(int64(p.cfg.MaxConcurrentDownloads))),
		unpack.WithDuplicationSuppressor(&p.once))
	if err != nil {
		return err
	}
	handler := u.Unpack(images.HandlerFunc(func(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		if desc.Digest == d.manifest.Digest {
			return append([]ocispec.Descriptor{d.config}, d.layers...), nil
		}
		return nil, p.fetch(ctx, desc)
	}))
	// The unpacker learns the layers from the manifest and starts with the config.
	for _, desc := range []ocispec.Descriptor{d.manifest, d.config} {
		if _, err := handler.Handle(ctx, desc); err != nil {
			return err
		}
	}
	if _, err := u.Wait(); err != nil {
		return err
	}
	return p.sync(ctx)
}

func (p *puller) mendLayer(ctx context.Context, layer ocispec.Descriptor) error {
	unlock, err := p.lockBlob(ctx, layer)
	if err != nil {
		return err
	}
	defer unlock()
	return p.mend(ctx, layer)
}

// sync makes unpacked layers durable before a record says that they exist.
func (p *puller) sync(ctx context.Context) error {
	if err := failSync.Hit(ctx); err != nil {
		return err
	}
	dir, err := os.Open(p.cfg.Root)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := unix.Syncfs(int(dir.Fd())); err != nil {
		return fmt.Errorf("sync the file system of %s: %w", p.cfg.Root, err)
	}
	return nil
}

// trusted are the chain IDs that image records confirm.
func (x *index) trusted() map[string]bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	chains := map[string]bool{}
	for _, e := range x.sorted {
		for chain := range slices.Values(e.details.chain) {
			chains[chain.String()] = true
		}
	}
	return chains
}
