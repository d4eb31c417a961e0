package main

import (
	"context"
	"io"
	"log/slog"

	"github.com/sirupsen/logrus"

	"github.com/tripod-run/tripod/internal/config"
)

// newLogger makes the process's logger and sends into it what libraries say to loggers of their own (klog's output
// is routed by internal/stream, whose libraries are the ones that use it).
func newLogger(c *config.Config, out io.Writer) *slog.Logger {
	options := &slog.HandlerOptions{Level: c.LogLevel()}
	var handler slog.Handler = slog.NewTextHandler(out, options)
	if c.Log.Format == "json" {
		handler = slog.NewJSONHandler(out, options)
	}
	log := slog.New(handler)
	slog.SetDefault(log) // the standard library's log too
	logrus.SetOutput(io.Discard)
	logrus.SetLevel(logrus.InfoLevel)
	logrus.StandardLogger().ReplaceHooks(logrus.LevelHooks{})
	logrus.AddHook(logrusHook{log.With("from", "containerd")})
	return log
}

// logrusHook passes what containerd's libraries log outside of any context of ours on to slog. Their "info" is
// what we call debug.
type logrusHook struct{ to *slog.Logger }

func (logrusHook) Levels() []logrus.Level { return logrus.AllLevels }

func (h logrusHook) Fire(e *logrus.Entry) error {
	level := slog.LevelDebug
	switch e.Level {
	case logrus.PanicLevel, logrus.FatalLevel, logrus.ErrorLevel:
		level = slog.LevelError
	case logrus.WarnLevel:
		level = slog.LevelWarn
	}
	attrs := make([]slog.Attr, 0, len(e.Data))
	for k, v := range e.Data {
		attrs = append(attrs, slog.Any(k, v))
	}
	h.to.LogAttrs(context.Background(), level, e.Message, attrs...)
	return nil
}
