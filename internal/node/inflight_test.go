package node

import (
	"context"
	"errors"
	"testing"
	"time"
)

func TestCloseWaitsForOrdersThenCancelsThem(t *testing.T) {
	o := order{call: StartContainer, limit: time.Hour, inflight: newInflight(t.Context())}
	var s slot
	hangs := func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) }
	gone, leave := context.WithCancel(t.Context())
	leave()
	if err := s.run(gone, o, hangs); !errors.Is(err, context.Canceled) {
		t.Errorf("run with a cancelled caller: got error %v, want context.Canceled", err)
	}
	if !o.inflight.close(10 * time.Millisecond) {
		t.Error("close = false, want true: the order under way heeds its context")
	}
	if err := s.run(t.Context(), o, hangs); !errors.Is(err, errNodeClosed) {
		t.Errorf("run after close: got error %v, want errNodeClosed", err)
	}
	if !o.inflight.close(time.Hour) {
		t.Error("second close = false, want true")
	}
}
