package guard

import (
	"context"
	"log/slog"
	"time"
)

// Every wraps a periodic f for a goroutine, which ends with ctx. A panic of f is handled as in Loop.
func Every(ctx context.Context, log *slog.Logger, where string, interval time.Duration, f func()) func() {
	return Loop(log, where, func() {
		ticker := time.NewTicker(interval)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
				f()
			}
		}
	})
}
