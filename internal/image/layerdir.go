package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/internal/layer"
	"github.com/tripod-run/tripod/internal/keys"
)

// The snapshotter manages the directories of snapshots but never checks that they exist, so an image with a missing
// layer could neither be used nor pulled again. This file checks and repairs the directories.
//
//	<root>/snapshots/snapshots/<number>/fs      the layer, or a container's writable part
//	                                   /fs.new  a layer that is being unpacked again
//	                                   /fs.bad  a damaged layer, which containers may have mounted

// snapshotDirs maps the names of snapshots to their directories.
type snapshotDirs map[string]string

func (s *Store) snapshotDirs(ctx context.Context) (snapshotDirs, error) {
	dirs, newest := snapshotDirs{}, map[string]uint64{}
	err := s.meta.WithTransaction(ctx, false, func(ctx context.Context) error {
		ids, err := storage.IDMap(ctx)
		for id, key := range ids {
			// In the metadata, a key is "<namespace>/<number>/<name>". A removed snapshot stays listed until it is
			// collected.
			parts := strings.SplitN(key, "/", 3)
			if len(parts) < 3 {
				continue
			}
			number, numberErr := strconv.ParseUint(parts[1], 10, 64)
			if name := parts[2]; numberErr == nil && number >= newest[name] {
				newest[name], dirs[name] = number, filepath.Join(s.cfg.Root, "snapshots", "snapshots", id)
			}
		}
		return err
	})
	if err != nil && !errdefs.IsNotFound(err) { // not found: no snapshot has ever been made
		return nil, fmt.Errorf("list the directories of snapshots: %w", err)
	}
	return dirs, nil
}

// errLayer is the class of damaged layers.
var errLayer = fmt.Errorf("the unpacked layer is damaged: %w", errdefs.ErrDataLoss)

// checkLayer checks, without reading files, that an unpacked layer exists. The error is errdefs.ErrNotFound if the
// layer was never unpacked, and errLayer if it is damaged.
func (s *Store) checkLayer(ctx context.Context, dirs snapshotDirs, chain string) error {
	if _, bad := s.badLayers.Load(chain); bad {
		return fmt.Errorf("layer %s: its files do not match its blob: %w", chain, errLayer)
	}
	usage, err := s.snaps.Usage(ctx, chain)
	dir, known := dirs[chain]
	if errdefs.IsNotFound(err) || err == nil && !known {
		return fmt.Errorf("layer %s is not unpacked: %w", chain, errdefs.ErrNotFound)
	} else if err != nil {
		return err
	}
	dir = filepath.Join(dir, "fs")
	info, err := os.Lstat(dir)
	if failure.IsGone(err) || err == nil && !info.IsDir() {
		return fmt.Errorf("layer %s: %s is missing: %w", chain, dir, errLayer)
	} else if err != nil {
		return err
	}
	if usage.Inodes > 1 { // the directory itself counts as one
		return notEmpty(chain, dir)
	}
	return nil
}

func notEmpty(chain, dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	if _, err := d.Readdirnames(1); errors.Is(err, io.EOF) {
		return fmt.Errorf("layer %s: %s is empty: %w", chain, dir, errLayer)
	} else if err != nil {
		return err
	}
	return nil
}

// present reports whether the directories in a snapshot's mounts exist.
func present(mounts []mount.Mount) bool {
	for _, m := range mounts {
		dirs := []string{m.Source}
		if m.Type != "bind" {
			_, dirs = layer.OverlayDirs(m)
		}
		for _, dir := range dirs {
			if _, err := os.Lstat(dir); failure.IsGone(err) {
				return false
			}
		}
	}
	return true
}

// repairLayers unpacks damaged layers again, in their existing directories, because the layers and containers above
// refer to these directories. Running containers keep the damaged content mounted.
func (p *puller) repairLayers(ctx context.Context, d *details) error {
	for i, chain := range d.chain {
		if err := p.repairLayer(ctx, d, i); err != nil {
			return fmt.Errorf("unpack layer %s again: %w", chain, err)
		}
	}
	return nil
}

func (p *puller) repairLayer(ctx context.Context, d *details, i int) error {
	chain, layer := d.chain[i].String(), d.layers[i]
	key := "repair://" + chain
	if err := p.locks.Lock(ctx, key); err != nil {
		return err
	}
	defer p.locks.Unlock(key)
	dirs, err := p.snapshotDirs(ctx)
	if err != nil {
		return err
	}
	err = p.checkLayer(ctx, dirs, chain)
	if !errors.Is(err, errLayer) {
		if errdefs.IsNotFound(err) {
			return nil // unpack unpacks it later
		}
		return err
	}
	p.cfg.Logger.WarnContext(ctx, "an unpacked layer is damaged; unpacking it again", "layer", chain, "err", err)
	if err := p.fetchLayer(ctx, layer); err != nil {
		return err
	}
	var lower []string
	for below := i - 1; below >= 0; below-- {
		lower = append(lower, filepath.Join(dirs[d.chain[below].String()], "fs"))
	}
	if err := p.unpackAgain(ctx, d, layer, dirs[chain], lower); err != nil {
		return err
	}
	p.badLayers.Delete(chain)
	return nil
}

func (p *puller) fetchLayer(ctx context.Context, layer ocispec.Descriptor) error {
	unlock, err := p.lockBlob(ctx, layer)
	if err != nil {
		return err
	}
	defer unlock()
	return p.fetch(ctx, layer)
}

// unpackAgain unpacks a layer into the directory of its snapshot. The error for a damaged blob is a corruptError, as
// when a layer is unpacked for the first time.
func (p *puller) unpackAgain(ctx context.Context, d *details, layer ocispec.Descriptor, dir string, lower []string) error {
	fresh, files, bad := filepath.Join(dir, "fs.new"), filepath.Join(dir, "fs"), filepath.Join(dir, "fs.bad")
	if err := errors.Join(os.RemoveAll(fresh), os.MkdirAll(fresh, 0o755), os.Chmod(dir, 0o700), os.Chmod(fresh, 0o755)); err != nil {
		return err
	}
	target := mount.Mount{Type: "bind", Source: fresh}
	if len(lower) > 0 {
		if err := sameOwner(fresh, lower[0]); err != nil {
			return err
		}
		target = mount.Mount{Type: "overlay", Options: []string{"upperdir=" + fresh, "lowerdir=" + strings.Join(lower, ":")}}
	}
	if _, err := p.applier(d).Apply(ctx, layer, []mount.Mount{target}); err != nil {
		return errors.Join(err, os.RemoveAll(fresh))
	}
	err := unix.Renameat2(unix.AT_FDCWD, fresh, unix.AT_FDCWD, files, unix.RENAME_EXCHANGE)
	if errors.Is(err, unix.ENOENT) {
		return os.Rename(fresh, files)
	}
	if err != nil {
		return err
	}
	// The old directory may be mounted. It is removed with the snapshot, or at the layer's next repair.
	return errors.Join(os.RemoveAll(bad), os.Rename(fresh, bad))
}

// sameOwner gives a directory the owner of the layer below it. The snapshotter does the same.
func sameOwner(dir, below string) error {
	var stat unix.Stat_t
	if err := unix.Stat(below, &stat); err != nil {
		return err
	}
	return os.Lchown(dir, int(stat.Uid), int(stat.Gid))
}

// dependents maps each layer to the keys of the containers' layers and views that depend on it.
func (s *Store) dependents(ctx context.Context) (map[string][]string, error) {
	parents, tops := map[string]string{}, []string(nil)
	for key, info := range s.layerList() {
		parents[key] = info.Chain
		tops = append(tops, key)
	}
	err := s.snaps.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		parents[info.Name] = info.Parent
		if owner := keys.Value(info.Labels, keys.Owner); owner != "" && owner != ownerFoundation {
			tops = append(tops, info.Name)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("walk snapshots: %w", err)
	}
	users := map[string][]string{}
	for _, key := range tops {
		for name := parents[key]; name != ""; name = parents[name] {
			users[name] = append(users[name], key)
		}
	}
	return users, nil
}
