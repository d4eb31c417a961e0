package main

import (
	"io"
	"log/slog"

	"github.com/tripod-run/tripod/internal/config"
)

// newLogger makes the process's logger, and sets it as the default of slog and so of the standard library's log. The
// packages that use foreign libraries route their loggers to it: internal/image containerd's, internal/stream klog.
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
