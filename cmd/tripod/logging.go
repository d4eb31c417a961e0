package main

import (
	"io"
	"log/slog"

	"github.com/tripod-run/tripod/internal/config"
)

// newLogger makes the process's logger and the default of slog, and with it of the standard library's log.
// The loggers of foreign libraries are routed into it by the packages that use those: containerd's by
// internal/image, klog by internal/stream.
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
