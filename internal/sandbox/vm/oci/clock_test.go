package oci

import (
	"context"
	"encoding/json"
	"io"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
)

// TestGuestClock: while a guest is watched, its clock is corrected by the difference from the node's, whatever a call takes. A
// difference that the duration of a call explains is none.
func TestGuestClock(t *testing.T) {
	for name, row := range map[string]struct {
		behind, there, back time.Duration // the guest's clock, and the two ways of a call
		want                time.Duration // the first correction; 0 if there is none
	}{
		"equal":             {0, time.Millisecond, time.Millisecond, 0},
		"an hour behind":    {time.Hour, 10 * time.Millisecond, 10 * time.Millisecond, time.Hour},
		"a second ahead":    {-time.Second, 10 * time.Millisecond, 10 * time.Millisecond, -time.Second},
		"a slow way there":  {0, time.Second, 0, 0},
		"a slow way back":   {0, 0, time.Second, 0},
		"behind, slow back": {2 * time.Second, 0, time.Second, 2*time.Second + 500*time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var behind, told, looks atomic.Int64
				behind.Store(int64(row.behind))
				r := newRig(t, &fakeGuest{answer: func(ctx context.Context, r guestapi.Request, in, out io.ReadWriter) error {
					if r.Method != guestapi.MethodClock {
						<-ctx.Done()
						return ctx.Err()
					}
					var c guestapi.Clock
					if err := json.NewDecoder(in).Decode(&c); err != nil {
						return err
					}
					if c.Behind != 0 {
						told.CompareAndSwap(0, int64(c.Behind))
						behind.Add(-int64(c.Behind))
						return nil
					}
					looks.Add(1)
					time.Sleep(row.there) // pacing: the way of the request
					answer := guestapi.Clock{Now: time.Now().Add(-time.Duration(behind.Load()))}
					time.Sleep(row.back) // pacing: the way of the answer
					return json.NewEncoder(out).Encode(answer)
				}})
				ctx, end := context.WithCancel(t.Context())
				watched := make(chan error, 1)
				go func() { watched <- r.watchOnce(ctx, r.pod) }()
				time.Sleep(clockPeriod / 2) // pacing: between two looks
				if got := time.Duration(told.Load()); got != row.want {
					t.Errorf("correction of the guest's clock: got %s, want %s", got, row.want)
				}
				time.Sleep(10 * clockPeriod) // pacing: ten more looks
				end()
				if <-watched; looks.Load() != 11 {
					t.Errorf("looks at the clock in ten minutes: got %d, want 11", looks.Load())
				}
			})
		})
	}
}
