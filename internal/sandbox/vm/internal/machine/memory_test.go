package machine

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

// guest is a fake guest whose memory changes by at most step bytes between two looks, and never below least.
type guest struct {
	actual, target, step, least uint64
	requests                    []uint64
	lost                        error
}

func (g *guest) memory() Memory {
	return Memory{
		Set: func(_ context.Context, memory uint64) error {
			g.target = memory
			g.requests = append(g.requests, memory)
			return nil
		},
		Actual: func(context.Context) (uint64, error) {
			goal := max(g.target, g.least)
			switch {
			case g.target == 0:
			case goal < g.actual:
				g.actual -= min(g.step, g.actual-goal)
			default:
				g.actual += min(g.step, goal-g.actual)
			}
			return g.actual, g.lost
		},
		Patience: 200 * time.Millisecond,
	}
}

func TestMemory(t *testing.T) {
	for what, c := range map[string]struct {
		guest    guest
		memory   uint64
		check    func(error) bool
		requests []uint64
	}{
		"shrinks":          {guest{actual: 100, step: 7}, 60, func(err error) bool { return err == nil }, []uint64{60}},
		"grows":            {guest{actual: 60, step: 7}, 100, func(err error) bool { return err == nil }, []uint64{100}},
		"is there":         {guest{actual: 100}, 100, func(err error) bool { return err == nil }, nil},
		"has no driver":    {guest{actual: 100}, 60, errdefs.IsNotImplemented, []uint64{60, 100}},
		"needs its memory": {guest{actual: 100, step: 7, least: 80}, 60, errdefs.IsFailedPrecondition, []uint64{60, 100}},
		"has just ended":   {guest{actual: 100, lost: errdefs.ErrUnavailable}, 60, errdefs.IsUnavailable, nil},
	} {
		err := c.guest.memory().Change(t.Context(), c.memory)
		if !c.check(err) || !slices.Equal(c.guest.requests, c.requests) {
			t.Errorf("a guest that %s: Change = %v with requests %v, want requests %v", what, err, c.guest.requests, c.requests)
		}
	}
}

// TestMemoryCancelled: a caller that goes away leaves the guest its earlier memory, and learns nothing about drivers.
func TestMemoryCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	g := guest{actual: 100}
	err := g.memory().Change(ctx, 60)
	if !errors.Is(err, context.Canceled) || errdefs.IsNotImplemented(err) || !slices.Equal(g.requests, []uint64{60, 100}) {
		t.Errorf("Change with a cancelled context = %v with requests %v", err, g.requests)
	}
}
