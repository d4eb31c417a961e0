package oci

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
)

// TestFailedTrialIsRepeated: the node offers user namespaces once a trial succeeds, however often it failed before.
func TestFailedTrialIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		u, trials := NewUsersTrial(errors.New("busy")), 0
		u.Begin(slog.New(slog.DiscardHandler), func(context.Context) error {
			if trials++; trials < 10 {
				return fmt.Errorf("trial %d", trials)
			}
			return nil
		})
		time.Sleep(usersFirstPause / 2) // pacing: the clock of the bubble
		if err := u.Reason(); err == nil || err.Error() != "busy" {
			t.Errorf("before the second trial: %v", err)
		}
		time.Sleep(usersFirstPause) // pacing: the clock of the bubble
		if err := u.Reason(); err == nil || err.Error() != "trial 1" {
			t.Errorf("after the second trial: %v", err)
		}
		time.Sleep(time.Hour) // pacing: the clock of the bubble
		if err := u.Reason(); err != nil || trials != 10 {
			t.Errorf("after an hour: %v, %d trials; want a success in the tenth", err, trials)
		}
		u.End()

		u = NewUsersTrial(errors.New("never"))
		u.Begin(slog.New(slog.DiscardHandler), func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
		time.Sleep(usersFirstPause) // pacing: a trial begins
		u.End()
	})
}
