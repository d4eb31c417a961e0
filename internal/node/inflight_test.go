package node

import (
	"context"
	"errors"
	"testing"
	"time"
)

func TestDutyWaitsThenGivesUp(t *testing.T) {
	o := order{call: StartContainer, limit: time.Hour, inflight: newInflight(t.Context())}
	var s slot
	hangs := func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) }
	gone, leave := context.WithCancel(t.Context())
	leave()
	if err := s.run(gone, o, hangs); !errors.Is(err, context.Canceled) {
		t.Errorf("the caller that went away got %v", err)
	}
	if !o.inflight.close(10 * time.Millisecond) {
		t.Error("an order that heeds its context was not ended")
	}
	if err := s.run(t.Context(), o, hangs); !errors.Is(err, errNodeClosed) {
		t.Errorf("an order to a closed node: %v", err)
	}
	if !o.inflight.close(time.Hour) {
		t.Error("closing again")
	}
}
