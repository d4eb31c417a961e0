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
	// collectPace gathers removals that come together into one collection.
	collectPace = 250 * time.Millisecond
	// collectEvery is how often leases that expired are looked for.
	collectEvery = time.Hour
)

// Kick has the collector run soon. It never waits.
func (s *Store) Kick() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// collectLoop removes what nothing refers to any more: after removals, and now and then for leases that expired.
func (s *Store) collectLoop() {
	if err := s.markDirty(s.base); err != nil && s.base.Err() == nil {
		s.cfg.Logger.Warn("what a crash may have left stays for now", "err", err)
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
			s.cfg.Logger.Warn("removed images and layers stay for now", "err", err)
		}
	}
}

// Collect removes all that no image, lease or container refers to, and returns when the disk space is free.
func (s *Store) Collect(ctx context.Context) error {
	if err := s.ready(); err != nil {
		return err
	}
	stats, err := s.db.GarbageCollect(s.with(ctx))
	if err != nil {
		return fmt.Errorf("collect garbage: %w", err)
	}
	s.cfg.Logger.DebugContext(ctx, "garbage collected", "took", stats.Elapsed())
	return nil
}

// markDirty has the next collection compare the metadata with the files in both stores. It does so only where it has
// seen a removal in this process; one that a crash cut short left files that nobody would look for.
func (s *Store) markDirty(ctx context.Context) error {
	const scrap = "tripod-scrap"
	if _, err := s.snaps.Prepare(ctx, scrap, ""); err != nil && !errdefs.IsAlreadyExists(err) {
		return err
	}
	// A collection that came between has removed it, which is as good.
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
