package machine

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
)

// patience is the time within which a guest must make progress. A guest that is alive makes some within
// milliseconds, but under emulation on a busy node it can take much longer.
const patience = 10 * time.Second

// lookInterval is the time between two looks at the memory of a guest. Not every driver has events of it.
const lookInterval = 20 * time.Millisecond

// Memory changes the memory of one running machine, for drivers. Sizes are the memory, in bytes, that the guest has.
type Memory struct {
	// Set requests a size, and Actual returns the size that the guest has reached.
	Set    func(ctx context.Context, memory uint64) error
	Actual func(ctx context.Context) (uint64, error)
	// Patience is the time within which the guest must make progress; 0 means the constant patience.
	Patience time.Duration
}

// Change implements Driver.SetMemory.
func (m Memory) Change(ctx context.Context, memory uint64) error {
	first, err := m.Actual(ctx)
	if err != nil || first == memory {
		return err
	}
	if err := m.Set(ctx, memory); err != nil {
		return err
	}
	last, err := m.await(ctx, first, memory)
	if err == nil {
		return nil
	}
	if undone := m.Set(context.WithoutCancel(ctx), first); undone != nil {
		return fmt.Errorf("%w; and its memory cannot be set back to %d: %w", err, first, undone)
	}
	if ctx.Err() == nil && last == first {
		return fmt.Errorf("%w: a guest needs drivers for virtio-balloon and virtio-mem: %w", err, errdefs.ErrNotImplemented)
	}
	return err
}

// await waits until the guest has the wanted memory. It returns the last size.
func (m Memory) await(ctx context.Context, last, wanted uint64) (uint64, error) {
	enough := cmp.Or(m.Patience, patience)
	tick, stuck := time.NewTicker(lookInterval), time.NewTimer(enough)
	defer tick.Stop()
	defer stuck.Stop()
	for {
		select {
		case <-tick.C:
		case <-stuck.C:
			return last, fmt.Errorf("the guest has %d bytes of memory instead of %d, and neither takes nor releases more: %w", last, wanted,
				errdefs.ErrFailedPrecondition)
		case <-ctx.Done():
			return last, fmt.Errorf("the guest has %d bytes of memory instead of %d: %w", last, wanted, context.Cause(ctx))
		}
		now, err := m.Actual(ctx)
		if err != nil || now == wanted {
			return now, err
		}
		if now != last {
			last = now
			stuck.Reset(enough)
		}
	}
}
