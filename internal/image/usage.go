package image

import (
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/keys"
)

// usageFresh is the age after which a cached usage is measured again.
const usageFresh = 10 * time.Second

// firstUsage is the usage of an empty writable layer, which has only its directory.
var firstUsage = Usage{Bytes: 4096, Inodes: 1}

// usageCache holds the usage of writable layers. One goroutine walks the trees, so that callers need not wait.
type usageCache struct {
	mu    sync.Mutex
	byKey map[string]*usageEntry
	work  chan string
}

type usageEntry struct {
	usage  Usage
	queued bool
}

// add records a new layer.
func (c *usageCache) add(key string) {
	first := firstUsage
	first.Timestamp = time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.byKey[key] = &usageEntry{usage: first}
}

func (c *usageCache) forget(key string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.byKey, key)
}

// get returns the cached usage, and requests a new measurement if that usage is old.
func (c *usageCache) get(key string) Usage {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.byKey[key]
	if e == nil {
		e = &usageEntry{}
		c.byKey[key] = e
	}
	if !e.queued && time.Since(e.usage.Timestamp) >= usageFresh {
		select {
		case c.work <- key:
			e.queued = true
		default: // the walker is far behind; the next call tries again
		}
	}
	return e.usage
}

func (c *usageCache) set(key string, usage Usage, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.byKey[key]
	switch {
	case e == nil: // released in the meantime
	case errdefs.IsNotFound(err):
		delete(c.byKey, key)
	default:
		e.queued = false
		if err == nil {
			e.usage = usage
		}
	}
}

func (s *Store) usageLoop() {
	for {
		select {
		case <-s.base.Done():
			return
		case key := <-s.usage.work:
			u, err := s.layerUsage(s.base, key)
			s.usage.set(key, Usage{Bytes: uint64(u.Size), Inodes: uint64(u.Inodes), Timestamp: time.Now()}, err)
		}
	}
}

// Usage returns the disk usage of the writable layer that Prepare made under key. It never walks files itself; a value
// older than ten seconds is measured again in the background. Before the first measurement the Timestamp is zero.
func (s *Store) Usage(ctx context.Context, key string) (Usage, error) {
	if err := s.readyFor(key); err != nil {
		return Usage{}, err
	}
	info, known := s.layer(key)
	if u := s.usage.get(key); known || !u.Timestamp.IsZero() {
		u.Mountpoint = info.Dir
		return u, nil
	}
	if _, err := s.snaps.Stat(s.withNamespace(ctx), key); err != nil {
		s.usage.forget(key)
		return Usage{}, fmt.Errorf("usage of root filesystem %q: %w", key, err)
	}
	return Usage{}, nil
}

// fsCache holds the usage of the whole store.
type fsCache struct {
	mu         sync.Mutex
	images     FsUsage
	containers FsUsage
	renewing   bool
}

// FsInfo returns the disk usage of images: blobs, downloads under way, unpacked layers and the store's own files. A
// value older than ten seconds is measured again in the background; only the first call waits.
//
// If the store is not open, FsInfo counts only the store's own files instead of failing, because a kubelet does not
// start without an answer.
func (s *Store) FsInfo(ctx context.Context) (FsUsage, error) {
	images, _, err := s.fsInfo(ctx)
	return images, err
}

// ContainerFsInfo is like FsInfo, for the containers' writable layers.
func (s *Store) ContainerFsInfo(ctx context.Context) (FsUsage, error) {
	_, containers, err := s.fsInfo(ctx)
	return containers, err
}

func (s *Store) fsInfo(ctx context.Context) (images, containers FsUsage, err error) {
	s.fs.mu.Lock()
	defer s.fs.mu.Unlock()
	if s.fs.images.Timestamp.IsZero() {
		s.fs.images, s.fs.containers, err = s.measure(s.withNamespace(ctx))
		return s.fs.images, s.fs.containers, err
	}
	if time.Since(s.fs.images.Timestamp) >= usageFresh && !s.fs.renewing && s.base.Err() == nil {
		s.fs.renewing = true
		s.wg.Go(guard.Func(s.cfg.Logger, "image usage", s.renewFsInfo))
	}
	return s.fs.images, s.fs.containers, nil
}

func (s *Store) renewFsInfo() {
	images, containers, err := s.measure(s.base)
	s.fs.mu.Lock()
	defer s.fs.mu.Unlock()
	s.fs.renewing = false
	if err == nil {
		s.fs.images, s.fs.containers = images, containers
	} else if s.base.Err() == nil {
		s.cfg.Logger.Warn("cannot measure the image store", "err", err)
	}
}

// measure adds up the store's usage. Unpacked layers were measured when they were unpacked, and writable layers have
// cached values, so measure reads only the few files of the content store.
func (s *Store) measure(ctx context.Context) (images, containers FsUsage, err error) {
	images = FsUsage{Mountpoint: s.cfg.Root, Timestamp: time.Now()}
	containers = images
	containers.Mountpoint = cmp.Or(s.cfg.ContainersDir, s.cfg.Root)
	if s.Err() != nil {
		err = s.measureFiles(&images)
		return images, containers, err
	}
	writable := func(key string) {
		u := s.usage.get(key)
		containers.UsedBytes += u.Bytes
		containers.InodesUsed += u.Inodes
	}
	for key := range s.layerList() {
		writable(key)
	}
	err = s.snaps.Walk(ctx, func(ctx context.Context, info snapshots.Info) error {
		if keys.Value(info.Labels, keys.Owner) == ownerWritable {
			writable(info.Name)
			return nil
		}
		if info.Kind != snapshots.KindCommitted {
			return nil
		}
		u, err := s.snaps.Usage(ctx, info.Name)
		if err != nil && !errdefs.IsNotFound(err) {
			return err
		}
		images.UsedBytes += uint64(u.Size)
		images.InodesUsed += uint64(u.Inodes)
		return nil
	})
	if err != nil {
		return images, containers, fmt.Errorf("usage of unpacked layers: %w", err)
	}
	return images, containers, s.measureFiles(&images)
}

func (s *Store) measureFiles(into *FsUsage) error {
	elsewhere := []string{filepath.Join(s.cfg.Root, "snapshots", "snapshots"), s.place(""), s.place(s.cfg.ContainersDir)}
	for _, dir := range append([]string{s.cfg.Root}, s.cfg.DerivedDirs...) {
		if err := s.measureDir(dir, elsewhere, into); err != nil {
			return err
		}
	}
	return nil
}

// measureDir adds the usage of the files below dir, except those below the directories elsewhere.
func (s *Store) measureDir(dir string, elsewhere []string, into *FsUsage) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if slices.Contains(elsewhere, path) {
			return filepath.SkipDir
		}
		var info fs.FileInfo
		if err == nil {
			info, err = d.Info()
		}
		if err != nil {
			// A file that disappears during the walk takes no space.
			if failure.IsGone(err) && (path != s.cfg.Root || s.Err() != nil) {
				return nil
			}
			return err
		}
		if stat, ok := info.Sys().(*syscall.Stat_t); ok {
			into.UsedBytes += uint64(stat.Blocks) * 512 // stat(2): st_blocks counts units of 512 bytes on every file system
			into.InodesUsed++
		}
		return nil
	})
}
