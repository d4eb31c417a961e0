package guard

import (
	"context"
	"log/slog"
	"time"
)

// Every wraps f for a goroutine that calls f once per interval until ctx ends. A panic of f is handled as in Loop.
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
