package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	confs "github.com/containerd/continuity/fs"
	"github.com/containerd/errdefs"
)

// The writable layers of containers are directories of our own. They live as long as a container, need not survive a power
// failure (docs/adr/0027), and come and go often, so they are in no database, and no sync waits for the disk:
//
//	<root>/containers/<key>/fs           what the container writes
//	                       /work         overlayfs's own directory
//	                       /layer.json   the image and its layers (layerFile)
//	                 /.new-…, .gone-…    being made, being removed
//
// containerd's metadata knows one snapshot for each image with containers, the image's foundation, whose key begins with
// foundationPrefix. It keeps the layers below from the collector while the image or a container of it exists, and has the
// options to mount them. Layers of versions before this one are snapshots themselves; they are served until they are
// released.
const (
	containersDir    = "containers"
	layerFile        = "layer.json"
	foundationPrefix = "foundation-"
	beingMade        = ".new-"
	beingRemoved     = ".gone-"
)

// writableLayers lists the writable layers.
type writableLayers struct {
	mu    sync.Mutex
	byKey map[string]layerInfo
	// foundations caches the mounts of foundations by the chain ID of the image.
	foundations map[string][]mount.Mount
	// sweep wakes sweepLoop.
	sweep chan struct{}
}

// layerInfo is the content of layerFile.
type layerInfo struct {
	Image  string            `json:"image"`
	Chain  string            `json:"chain"`
	Labels map[string]string `json:"labels,omitempty"`
}

func (s *Store) layerDir(key string) string {
	return filepath.Join(s.cfg.Root, containersDir, url.PathEscape(key))
}

// openLayers reads the layers that exist, and removes what earlier processes left half-made or half-removed. A layer
// whose file a power failure damaged stays listed, so that its container can release it, but has no mounts.
func (s *Store) openLayers(ctx context.Context) error {
	dir := filepath.Join(s.cfg.Root, containersDir)
	s.layers.byKey, s.layers.foundations = map[string]layerInfo{}, map[string][]mount.Mount{}
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return os.Mkdir(dir, 0o700)
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if strings.HasPrefix(e.Name(), beingMade) { // it is small
			if err := os.RemoveAll(path); err != nil {
				return err
			}
		}
		if strings.HasPrefix(e.Name(), ".") {
			continue
		}
		key, err := url.PathUnescape(e.Name())
		if err != nil {
			continue // not ours
		}
		var info layerInfo
		raw, err := os.ReadFile(filepath.Join(path, layerFile))
		if err == nil {
			err = json.Unmarshal(raw, &info)
		}
		if err != nil {
			s.cfg.Logger.WarnContext(ctx, "a container's layer is damaged", "key", key, "err", err)
		}
		s.layers.byKey[key] = info
	}
	return nil
}

// dropFoundations removes the foundations that nothing needs, after the images and the layers have been read.
func (s *Store) dropFoundations(ctx context.Context) error {
	var chains []string
	err := s.snaps.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if chain, ok := strings.CutPrefix(info.Name, foundationPrefix); ok && info.Labels[labelOwner] == ownerFoundation {
			chains = append(chains, chain)
		}
		return nil
	})
	for _, chain := range chains {
		err = errors.Join(err, s.dropFoundation(ctx, chain))
	}
	return err
}

// makeLayer makes a container's layer, or returns the mounts of the one that exists.
func (s *Store) makeLayer(ctx context.Context, key string, info layerInfo) ([]mount.Mount, error) {
	s.layers.mu.Lock()
	defer s.layers.mu.Unlock()
	old, exists := s.layers.byKey[key]
	if exists && old.Chain != info.Chain {
		return nil, fmt.Errorf("it already exists, for %s: %w", old.Image, errdefs.ErrAlreadyExists)
	}
	below, err := s.foundation(ctx, info.Chain)
	if err != nil || exists {
		return over(below, s.layerDir(key)), err
	}
	if _, err := s.snaps.Stat(ctx, key); err == nil {
		return nil, errSnapshot
	}
	draft := filepath.Join(s.cfg.Root, containersDir, beingMade+url.PathEscape(key))
	err = s.fillLayer(draft, below, info)
	if err == nil {
		err = os.Rename(draft, s.layerDir(key))
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(draft))
	}
	s.layers.byKey[key] = info
	return over(below, s.layerDir(key)), nil
}

// errSnapshot says that a key belongs to a snapshot: a view, or a layer of an earlier version.
var errSnapshot = errors.New("a snapshot has this key")

func (s *Store) fillLayer(dir string, below []mount.Mount, info layerInfo) error {
	if err := os.RemoveAll(dir); err != nil { // left by a failed attempt
		return err
	}
	for path, mode := range map[string]fs.FileMode{"": 0o700, "fs": 0o755, "work": 0o711} {
		if err := os.MkdirAll(filepath.Join(dir, path), mode); err != nil {
			return err
		}
	}
	if _, lower := overlayDirs(below[0]); below[0].Type == "overlay" {
		if err := sameOwner(filepath.Join(dir, "fs"), lower[0]); err != nil {
			return err
		}
	}
	raw, err := json.Marshal(info)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, layerFile), raw, 0o600)
}

// foundation returns the mounts of an image's foundation, and makes it if it does not exist. Its layers must be present.
// The caller holds layers.mu.
func (s *Store) foundation(ctx context.Context, chain string) ([]mount.Mount, error) {
	mounts := s.layers.foundations[chain]
	if mounts == nil {
		var err error
		key := foundationPrefix + chain
		mounts, err = s.snaps.Prepare(ctx, key, chain, snapshots.WithLabels(ownLabels(ownerFoundation)))
		if errdefs.IsAlreadyExists(err) {
			mounts, err = s.snaps.Mounts(ctx, key)
		}
		if err != nil {
			return nil, err
		}
		if len(mounts) != 1 {
			return nil, fmt.Errorf("an image of %d mounts: %w", len(mounts), errdefs.ErrNotImplemented)
		}
		s.layers.foundations[chain] = mounts
	}
	if !present(mounts) {
		return nil, fmt.Errorf("layers of %s: %w", chain, errdefs.ErrNotFound)
	}
	return mounts, nil
}

// over returns the mounts of a foundation with the writable directories of a layer.
func over(below []mount.Mount, dir string) []mount.Mount {
	if below == nil {
		return nil
	}
	m := below[0]
	upper, work := filepath.Join(dir, "fs"), filepath.Join(dir, "work")
	if m.Type == "bind" { // an image without layers
		m.Source = upper
		return []mount.Mount{m}
	}
	m.Options = slices.Clone(m.Options)
	for i, option := range m.Options {
		switch name, _, _ := strings.Cut(option, "="); name {
		case "upperdir":
			m.Options[i] = "upperdir=" + upper
		case "workdir":
			m.Options[i] = "workdir=" + work
		}
	}
	return []mount.Mount{m}
}

// layerMounts returns the mounts of a layer. The layer is not ours if known is false.
func (s *Store) layerMounts(ctx context.Context, key string) (mounts []mount.Mount, known bool, err error) {
	s.layers.mu.Lock()
	defer s.layers.mu.Unlock()
	info, known := s.layers.byKey[key]
	if !known {
		return nil, false, nil
	}
	if info.Chain == "" {
		return nil, true, fmt.Errorf("%s is damaged: %w", layerFile, errdefs.ErrNotFound)
	}
	below, err := s.foundation(ctx, info.Chain)
	return over(below, s.layerDir(key)), true, err
}

// releaseLayer removes a layer. Its files go in the background. The layer is not ours if known is false.
func (s *Store) releaseLayer(ctx context.Context, key string) (known bool, err error) {
	gone := filepath.Join(s.cfg.Root, containersDir, beingRemoved+url.PathEscape(key))
	s.layers.mu.Lock()
	info, known := s.layers.byKey[key]
	if known {
		if err = os.Rename(s.layerDir(key), gone); err == nil || isGone(err) {
			delete(s.layers.byKey, key)
			err = nil
		}
	}
	s.layers.mu.Unlock()
	if !known || err != nil {
		return known, err
	}
	s.sweepLayers()
	return true, s.dropFoundation(ctx, info.Chain)
}

// sweepLayers makes sweepLoop remove the files of released layers. It never blocks.
func (s *Store) sweepLayers() {
	select {
	case s.layers.sweep <- struct{}{}:
	default:
	}
}

// sweepPause is the time between two attempts to remove files that could not be removed.
const sweepPause = time.Second

// sweepLoop removes the files of released layers, and those that an earlier process left, until the store is closed.
func (s *Store) sweepLoop() {
	for failing := false; ; {
		err := s.removeReleased()
		if err != nil && !failing {
			s.cfg.Logger.Warn("cannot remove the files of containers' layers, will retry", "err", err)
		}
		failing = err != nil
		var retry <-chan time.Time
		if failing {
			retry = time.After(sweepPause)
		}
		select {
		case <-s.layers.sweep:
		case <-retry:
		case <-s.base.Done():
			_ = s.removeReleased() // what was released last
			return
		}
	}
}

func (s *Store) removeReleased() error {
	dir := filepath.Join(s.cfg.Root, containersDir)
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), beingRemoved) {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	return err
}

// dropFoundation removes a foundation unless an image or a layer needs it.
func (s *Store) dropFoundation(ctx context.Context, chain string) error {
	s.layers.mu.Lock()
	defer s.layers.mu.Unlock()
	for _, info := range s.layers.byKey {
		if info.Chain == chain {
			return nil
		}
	}
	for _, e := range s.index.entries() {
		if e.image.ChainID == chain {
			return nil
		}
	}
	delete(s.layers.foundations, chain)
	if err := s.snaps.Remove(ctx, foundationPrefix+chain); err != nil {
		if errdefs.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("release the layers of %s: %w", chain, err)
	}
	s.Kick()
	return nil
}

// layerList returns the layers by key.
func (s *Store) layerList() map[string]layerInfo {
	s.layers.mu.Lock()
	defer s.layers.mu.Unlock()
	all := make(map[string]layerInfo, len(s.layers.byKey))
	for key, info := range s.layers.byKey {
		all[key] = info
	}
	return all
}

// layerUsage walks the files of a writable layer.
func (s *Store) layerUsage(ctx context.Context, key string) (snapshots.Usage, error) {
	if _, known := s.layerList()[key]; !known {
		return s.snaps.Usage(ctx, key)
	}
	u, err := confs.DiskUsage(ctx, filepath.Join(s.layerDir(key), "fs"))
	if isGone(err) {
		err = fmt.Errorf("layer %q: %w", key, errdefs.ErrNotFound)
	}
	return snapshots.Usage(u), err
}
