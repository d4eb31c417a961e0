package image

import (
	"context"
	"fmt"
	"os"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/unpack"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/image/internal/layer"
)

var (
	failUnpack = failpoint.New("image.pull.unpack")
	failSync   = failpoint.New("image.pull.sync")
)

// unpack fetches the layers of a root filesystem and unpacks each as soon as it and the layers below it are present. It
// does not fetch layers that another image has unpacked.
func (p *puller) unpack(ctx context.Context, d *details) error {
	if err := failUnpack.Hit(ctx); err != nil {
		return err
	}
	for _, layer := range d.layers {
		if err := p.dropDamagedLayer(ctx, layer); err != nil {
			return err
		}
	}
	if err := p.repairLayers(ctx, d); err != nil {
		return err
	}
	u, err := unpack.NewUnpacker(ctx, p.content,
		unpack.WithUnpackPlatform(unpack.Platform{
			// The platform was chosen with the manifest; accept any platform here.
			Platform:       platforms.All,
			SnapshotterKey: snapshotter,
			Snapshotter:    p.snaps,
			Applier:        p.applier(d),
			ConfigType:     d.config.MediaType,
		}),
		unpack.WithLimiter(semaphore.NewWeighted(int64(p.cfg.MaxConcurrentDownloads))),
		unpack.WithDuplicationSuppressor(&p.locks))
	if err != nil {
		return err
	}
	handler := u.Unpack(images.HandlerFunc(func(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		if desc.Digest == d.manifest.Digest {
			return append([]ocispec.Descriptor{d.config}, d.layers...), nil
		}
		return nil, p.fetch(ctx, desc)
	}))
	// The unpacker learns the layers from the manifest, and starts to unpack when it is given the config.
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

// applier unpacks the layers of one image.
func (p *puller) applier(d *details) *layer.Applier {
	diffIDs := map[digest.Digest]digest.Digest{}
	for i, layer := range d.layers {
		diffIDs[layer.Digest] = d.image.RootFS.DiffIDs[i]
	}
	limits := layer.Limits{Bytes: p.cfg.Limits.UnpackedBytes, Files: p.cfg.Limits.UnpackedFiles}
	return layer.NewApplier(p.content, p.tracker, p.cfg.Logger, limits, diffIDs)
}

func (p *puller) dropDamagedLayer(ctx context.Context, layer ocispec.Descriptor) error {
	unlock, err := p.lockBlob(ctx, layer)
	if err != nil {
		return err
	}
	defer unlock()
	return p.dropDamaged(ctx, layer)
}

// sync makes unpacked layers durable. Call it before writing the records that refer to the layers.
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

// trusted returns the chain IDs of the layers of all recorded images.
func (x *index) trusted() map[string]bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	chains := map[string]bool{}
	for _, e := range x.sorted {
		for _, chain := range e.details.chain {
			chains[chain.String()] = true
		}
	}
	return chains
}
