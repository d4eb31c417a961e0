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

// Sleep pauses for d. If ctx ends first, it returns ctx's cause.
func Sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// IsClosed reports whether a channel that is only ever closed is closed.
func IsClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
