package oci

import (
	"context"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
)

const (
	// clockPeriod is the time between two looks at the clock of a guest. A guest has no other source of time, and the node's
	// clock can be set.
	clockPeriod = time.Minute
	// clockError is how far a guest's clock may be from the node's.
	clockError = 5 * time.Millisecond
)

// keepClock keeps the clock of a pod's guest like the node's until the context ends.
func (o *Backend) keepClock(ctx context.Context, pod string) {
	tick := time.NewTicker(clockPeriod)
	defer tick.Stop()
	for {
		if err := o.setClock(ctx, pod); err != nil && ctx.Err() == nil {
			o.log.Warn("cannot set the clock of a guest", "pod", pod, "err", err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// setClock corrects the guest's clock by its difference from the node's in the middle of a call. The duration of the call is the
// most by which the difference can be wrong, twice, so a smaller one is no reason to correct the clock.
func (o *Backend) setClock(ctx context.Context, pod string) error {
	ctx, cancel := context.WithTimeout(ctx, guestTime)
	defer cancel()
	var guest guestapi.Clock
	sent := time.Now()
	if err := o.call(ctx, pod, guestapi.Request{Method: guestapi.MethodClock}, guestapi.Clock{}, &guest); err != nil {
		return err
	}
	half := time.Since(sent) / 2
	behind := sent.Add(half).Sub(guest.Now)
	if behind.Abs() <= half+clockError {
		return nil
	}
	return o.call(ctx, pod, guestapi.Request{Method: guestapi.MethodClock}, guestapi.Clock{Behind: behind}, nil)
}
