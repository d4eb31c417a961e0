package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
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

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/internal/layer"
	"github.com/tripod-run/tripod/internal/keys"
)

// The writable layers of containers are directories of our own. They live as long as a container, need not survive a power
// failure (docs/adr/0027), and come and go often, so they are in no database, and no sync waits for the disk:
//
//	<root>/containers/<key>/fs           what the container writes
//	                       /work         overlayfs's own directory
//	                       /layer.json   the image and its layers (layerFile)
//	                 /.new-…, .gone-…    being made, being removed
//
// With Config.ContainersDir, fs and work are on another file system (places.go).
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
	// unneeded are the chain IDs of foundations whose removal failed. sweepLoop repeats it.
	unneeded map[string]bool
	// places are the directories with files of layers, the store's own last. Only openLayers changes them.
	places []string
	// sweep wakes sweepLoop.
	sweep chan struct{}
}

// layerInfo is the content of layerFile.
type layerInfo struct {
	Image  string            `json:"image"`
	Chain  string            `json:"chain"`
	Labels map[string]string `json:"labels,omitempty"`
	// Dir is the Config.ContainersDir that the layer was made with, so that a container keeps its layer after a change of
	// the configuration.
	Dir string `json:"dir,omitempty"`
}

// readLayer reads the file of a layer in this directory.
func readLayer(dir string) (info layerInfo, err error) {
	raw, err := os.ReadFile(filepath.Join(dir, layerFile))
	if err != nil {
		return info, err
	}
	return info, json.Unmarshal(raw, &info)
}

// openLayers reads the layers that exist, and removes what earlier processes left half-made or half-removed. A layer
// whose file a power failure damaged stays listed, so that its container can release it, but has no mounts.
func (s *Store) openLayers(ctx context.Context) error {
	if err := s.checkContainersDir(); err != nil {
		return err
	}
	own, configured := s.place(""), s.place(s.cfg.ContainersDir)
	s.layers.byKey, s.layers.foundations, s.layers.unneeded = map[string]layerInfo{}, map[string][]mount.Mount{}, map[string]bool{}
	for _, dir := range []string{own, configured} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	entries, err := os.ReadDir(own)
	if err != nil {
		return err
	}
	places := map[string]bool{configured: true}
	for _, e := range entries {
		path := filepath.Join(own, e.Name())
		info, damage := readLayer(path)
		places[s.place(info.Dir)] = true
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
		if damage != nil {
			s.cfg.Logger.WarnContext(ctx, "a container's layer is damaged", "key", key, "err", damage)
		}
		s.layers.byKey[key] = info
	}
	delete(places, own)
	s.layers.places = append(slices.Sorted(maps.Keys(places)), own)
	s.discardStrays(ctx)
	return nil
}

// dropFoundations removes the foundations that nothing needs, after the images and the layers have been read.
func (s *Store) dropFoundations(ctx context.Context) error {
	var chains []string
	err := s.snaps.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if chain, ok := strings.CutPrefix(info.Name, foundationPrefix); ok && keys.Value(info.Labels, keys.Owner) == ownerFoundation {
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
		return over(below, s.filesOf(key, old)), err
	}
	if _, err := s.snaps.Stat(ctx, key); err == nil {
		return nil, errSnapshot
	}
	draft := filepath.Join(s.place(""), beingMade+url.PathEscape(key))
	files := draft
	if info.Dir != "" {
		files = s.filesOf(key, info)
	}
	err = fillLayer(draft, files, below, info)
	if err == nil {
		err = os.Rename(draft, s.layerDir(key))
	}
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(draft), os.RemoveAll(files))
	}
	s.layers.byKey[key] = info
	return over(below, s.filesOf(key, info)), nil
}

// errSnapshot says that a key belongs to a snapshot: a view, or a layer of an earlier version.
var errSnapshot = errors.New("a snapshot has this key")

// fillLayer makes the two parts of a layer, which may be the same directory. The layer's file is written first: after
// an interruption it names the place of the others.
func fillLayer(dir, files string, below []mount.Mount, info layerInfo) error {
	if err := errors.Join(os.RemoveAll(dir), os.RemoveAll(files)); err != nil { // left by a failed attempt
		return err
	}
	raw, err := json.Marshal(info)
	if err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, layerFile), raw, 0o600); err != nil {
		return err
	}
	if files != dir {
		// Not MkdirAll: if the other file system is not mounted, nothing may be written below its mount point.
		if err := os.Mkdir(files, 0o700); err != nil {
			return err
		}
	}
	for name, mode := range map[string]fs.FileMode{"fs": 0o755, "work": 0o711} {
		if err := os.Mkdir(filepath.Join(files, name), mode); err != nil {
			return err
		}
	}
	if _, lower := layer.OverlayDirs(below[0]); below[0].Type == "overlay" {
		return sameOwner(filepath.Join(files, "fs"), lower[0])
	}
	return nil
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
	files := s.filesOf(key, info)
	if _, err := os.Lstat(filepath.Join(files, "fs")); failure.IsGone(err) { // by a power failure
		return nil, true, fmt.Errorf("the layer's files in %s are missing: %w", files, errdefs.ErrNotFound)
	}
	below, err := s.foundation(ctx, info.Chain)
	return over(below, files), true, err
}

// releaseLayer removes a layer. Its files go in the background. The layer is not ours if known is false.
func (s *Store) releaseLayer(ctx context.Context, key string) (known bool, err error) {
	s.layers.mu.Lock()
	info, known := s.layers.byKey[key]
	if known {
		if err = s.discardLayer(key); err == nil {
			delete(s.layers.byKey, key)
		}
	}
	s.layers.mu.Unlock()
	if !known || err != nil {
		return known, err
	}
	s.sweepLayers()
	s.releaseFoundation(ctx, info.Chain)
	return true, nil
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

// sweepLoop removes the files of released layers, those that an earlier process left, and foundations whose removal
// failed, until the store is closed. The next process removes the rest.
func (s *Store) sweepLoop() {
	for failing := false; ; {
		err := errors.Join(s.removeReleased(), s.removeUnneeded())
		if err != nil && !failing {
			s.cfg.Logger.Warn("cannot remove released layers, will retry", "err", err)
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
			return
		}
	}
}

// releaseFoundation removes a foundation unless an image or a layer needs it. The caller's change has been made, and a
// repeat would not come here again, so a failure is left to sweepLoop.
func (s *Store) releaseFoundation(ctx context.Context, chain string) {
	if s.dropFoundation(ctx, chain) == nil {
		return
	}
	s.layers.mu.Lock()
	s.layers.unneeded[chain] = true
	s.layers.mu.Unlock()
	s.sweepLayers()
}

// removeUnneeded repeats the removals of foundations that failed.
func (s *Store) removeUnneeded() error {
	s.layers.mu.Lock()
	chains := slices.Collect(maps.Keys(s.layers.unneeded))
	s.layers.mu.Unlock()
	var errs []error
	for _, chain := range chains {
		err := s.dropFoundation(s.withNamespace(s.base), chain)
		errs = append(errs, err)
		if err == nil {
			s.layers.mu.Lock()
			delete(s.layers.unneeded, chain)
			s.layers.mu.Unlock()
		}
	}
	return errors.Join(errs...)
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
	if err := failFoundation.Hit(ctx); err != nil {
		return err
	}
	if err := s.snaps.Remove(ctx, foundationPrefix+chain); err != nil {
		if errdefs.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("release the layers of %s: %w", chain, err)
	}
	s.Kick()
	return nil
}

// layer returns a layer. It is not ours if known is false.
func (s *Store) layer(key string) (info layerInfo, known bool) {
	s.layers.mu.Lock()
	defer s.layers.mu.Unlock()
	info, known = s.layers.byKey[key]
	return info, known
}

// layerList returns the layers by key.
func (s *Store) layerList() map[string]layerInfo {
	s.layers.mu.Lock()
	defer s.layers.mu.Unlock()
	return maps.Clone(s.layers.byKey)
}

// layerUsage walks the files of a writable layer.
func (s *Store) layerUsage(ctx context.Context, key string) (snapshots.Usage, error) {
	info, known := s.layer(key)
	if !known {
		return s.snaps.Usage(ctx, key)
	}
	u, err := confs.DiskUsage(ctx, filepath.Join(s.filesOf(key, info), "fs"))
	if failure.IsGone(err) {
		err = fmt.Errorf("layer %q: %w", key, errdefs.ErrNotFound)
	}
	return snapshots.Usage(u), err
}
