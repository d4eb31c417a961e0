package stream

import (
	"context"
	"log/slog"
	"sync"

	"k8s.io/klog/v2"
)

var klogRouted sync.Once

// routeKlog sends the log messages of the Kubernetes libraries to the given logger. It lowers the messages to debug
// level, because the libraries log faults of clients as errors, and a client that hangs up is not an error of the node.
// klog is global to the process, so the first server's logger gets all messages.
func routeKlog(logger *slog.Logger) {
	klogRouted.Do(func() { klog.SetSlogLogger(slog.New(quiet{logger.With("component", "klog").Handler()})) })
}

// quiet is a handler that turns every record into a debug record.
type quiet struct{ slog.Handler }

func (q quiet) Enabled(ctx context.Context, _ slog.Level) bool {
	return q.Handler.Enabled(ctx, slog.LevelDebug)
}

// Handle also asks whether the record is wanted, because klog does not ask for its errors.
func (q quiet) Handle(ctx context.Context, r slog.Record) error {
	if !q.Enabled(ctx, slog.LevelDebug) {
		return nil
	}
	r.Level = slog.LevelDebug
	return q.Handler.Handle(ctx, r)
}

func (q quiet) WithAttrs(attrs []slog.Attr) slog.Handler { return quiet{q.Handler.WithAttrs(attrs)} }

func (q quiet) WithGroup(name string) slog.Handler { return quiet{q.Handler.WithGroup(name)} }
