package wasm

import (
	"context"
	"errors"
	"slices"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/code"
)

// Compilation returns the state of the code of an image's component, or false if the image has no component.
func (b *Backend) Compilation(imageID string) (sandbox.Compilation, bool) {
	return b.precompiler.Find(b.background, imageID)
}

// followImages compiles the components of images as they are stored, until ctx ends. It begins after Recover, because
// the components of running pods come first.
func (b *Backend) followImages(ctx context.Context) {
	changes := b.cfg.Images.Changes()
	select {
	case <-b.recovered:
	case <-ctx.Done():
		return
	}
	b.improve() // the previous daemon may have ended in between
	for {
		if err := b.collectCode(ctx); err != nil && ctx.Err() == nil && !errors.Is(err, image.ErrNotOpen) {
			b.log.Warn("cannot compile the components of stored images; the next attempt is in a minute", "err", err)
		}
		select {
		case <-changes:
		case <-ctx.Done():
			return
		}
	}
}

// collectCode queues the compilation of components that have no code, those of pods first, and deletes the code that no
// image or container needs.
func (b *Backend) collectCode(ctx context.Context) error {
	wanted, inUse := map[string]bool{}, map[string]bool{}
	for _, h := range b.ledger.All() {
		if s, _ := h.Snapshot(); s.Artifact != nil {
			wanted[s.Artifact.Wasm.Digest.String()] = true
			inUse[s.Artifact.ImageID] = true
		}
	}
	images, err := b.cfg.Images.List(ctx)
	if err != nil {
		return err
	}
	slices.SortStableFunc(images, func(x, y image.Image) int {
		switch {
		case inUse[x.ID] == inUse[y.ID]:
			return y.LastUsed.Compare(x.LastUsed)
		case inUse[x.ID]:
			return -1
		default:
			return 1
		}
	})
	urgency := code.PriorityBackground
	if b.listed.Load() {
		urgency = code.PriorityPull
	}
	stored, err := b.precompiler.Follow(b.background, images, urgency) // compilations outlive this call
	if err != nil {
		return err // delete nothing without the complete list
	}
	b.listed.Store(true)
	for digest := range stored {
		wanted[digest] = true
	}
	return b.cache.Evict(wanted)
}
