package main

import (
	"io"
	"log/slog"

	"github.com/tripod-run/tripod/internal/config"
)

// newLogger makes the process's logger. It also makes that logger the default of slog, and thereby of package log.
// Other packages make their libraries log to it: internal/image does so for containerd, and internal/stream for klog.
func newLogger(c *config.Config, out io.Writer) *slog.Logger {
	options := &slog.HandlerOptions{Level: c.LogLevel()}
	var handler slog.Handler = slog.NewTextHandler(out, options)
	if c.Log.Format == "json" {
		handler = slog.NewJSONHandler(out, options)
	}
	log := slog.New(handler)
	slog.SetDefault(log)
	return log
}
