package machine

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
)

// balloonPatience is the time within which a guest must make progress. A guest that is alive moves its balloon within
// milliseconds, but under emulation on a busy node it can take much longer.
const balloonPatience = 10 * time.Second

// balloonInterval is the time between two looks at a moving balloon. Not every driver has events of the balloon.
const balloonInterval = 20 * time.Millisecond

// Balloon is the balloon of one running machine, for drivers. Sizes are the memory, in bytes, that is left to the guest.
type Balloon struct {
	// Set requests a size, and Actual returns the size that the guest has reached.
	Set    func(ctx context.Context, memory uint64) error
	Actual func(ctx context.Context) (uint64, error)
	// Patience is the time within which the guest must make progress; 0 means balloonPatience.
	Patience time.Duration
}

// Move implements Driver.Balloon.
func (b Balloon) Move(ctx context.Context, memory uint64) error {
	first, err := b.Actual(ctx)
	if err != nil || first == memory {
		return err
	}
	if err := b.Set(ctx, memory); err != nil {
		return err
	}
	last, err := b.await(ctx, first, memory)
	if err == nil {
		return nil
	}
	if undone := b.Set(context.WithoutCancel(ctx), first); undone != nil {
		return fmt.Errorf("%w; and its balloon cannot be set back to %d: %w", err, first, undone)
	}
	if ctx.Err() == nil && last == first {
		return fmt.Errorf("%w: a guest needs a driver for virtio-balloon: %w", err, errdefs.ErrNotImplemented)
	}
	return err
}

// await waits until the balloon has reached the wanted size. It returns the last size.
func (b Balloon) await(ctx context.Context, last, wanted uint64) (uint64, error) {
	patience := b.Patience
	if patience == 0 {
		patience = balloonPatience
	}
	tick, stuck := time.NewTicker(balloonInterval), time.NewTimer(patience)
	defer tick.Stop()
	defer stuck.Stop()
	for {
		select {
		case <-tick.C:
		case <-stuck.C:
			return last, fmt.Errorf("the guest has %d bytes of memory instead of %d, and releases no more: %w", last, wanted, errdefs.ErrFailedPrecondition)
		case <-ctx.Done():
			return last, fmt.Errorf("the guest has %d bytes of memory instead of %d: %w", last, wanted, context.Cause(ctx))
		}
		now, err := b.Actual(ctx)
		if err != nil || now == wanted {
			return now, err
		}
		if now != last {
			last = now
			stuck.Reset(patience)
		}
	}
}
