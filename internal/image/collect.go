package image

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

const (
	// collectPace is the pause before a collection, so that more removals can accumulate.
	collectPace = 250 * time.Millisecond
	// collectEvery is the interval between checks for expired leases.
	collectEvery = time.Hour
)

// Kick makes the collector run soon. It never blocks.
func (s *Store) Kick() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// collectLoop removes unreferenced data: after removals, and periodically, because leases expire.
func (s *Store) collectLoop() {
	if err := s.markDirty(s.base); err != nil && s.base.Err() == nil {
		s.cfg.Logger.Warn("cannot clean up after a crash; leftovers stay for now", "err", err)
	}
	ticker := time.NewTicker(collectEvery)
	defer ticker.Stop()
	for {
		select {
		case <-s.base.Done():
			return
		case <-ticker.C:
		case <-s.kick:
			select {
			case <-time.After(collectPace):
			case <-s.base.Done():
				return
			}
		}
		if err := s.Collect(s.base); err != nil && s.base.Err() == nil {
			s.cfg.Logger.Warn("garbage collection failed; removed images and layers stay for now", "err", err)
		}
	}
}

// Collect removes everything that no image, lease or container refers to, and returns once the disk space is free.
func (s *Store) Collect(ctx context.Context) error {
	if err := s.ready(); err != nil {
		return err
	}
	stats, err := s.db.GarbageCollect(s.withNamespace(ctx))
	if err != nil {
		return fmt.Errorf("collect garbage: %w", err)
	}
	s.cfg.Logger.DebugContext(ctx, "garbage collected", "took", stats.Elapsed())
	return nil
}

// markDirty makes the next collection compare the metadata with the files of both stores. By itself, containerd
// compares them only after a removal in this process, and would miss the files that an earlier process was still
// removing when it crashed.
func (s *Store) markDirty(ctx context.Context) error {
	const scrap = "tripod-scrap"
	if _, err := s.snaps.Prepare(ctx, scrap, ""); err != nil && !errdefs.IsAlreadyExists(err) {
		return err
	}
	// If a collection has removed the snapshot in the meantime, that collection has also made the comparison.
	if err := s.snaps.Remove(ctx, scrap); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	desc := ocispec.Descriptor{Digest: digest.FromString(scrap), Size: int64(len(scrap))}
	if err := content.WriteBlob(ctx, s.content, scrap, strings.NewReader(scrap), desc); err != nil {
		return err
	}
	if err := s.content.Delete(ctx, desc.Digest); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return nil
}
