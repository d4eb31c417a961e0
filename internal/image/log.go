package image

import (
	"context"
	"io"
	"log/slog"
	"sync"

	"github.com/containerd/log"
	"github.com/sirupsen/logrus"
)

// bridge is the logger for containerd's libraries, which speak logrus: everything goes on to slog.
// Their "info" is a line per request, so it counts as debug here.
func bridge(to *slog.Logger) *log.Entry {
	l := logrus.New()
	l.SetOutput(io.Discard)
	l.SetLevel(logrus.InfoLevel)
	l.AddHook(slogHook{to: to})
	return logrus.NewEntry(l)
}

// routeLogs sends where slog.Default goes what containerd logs without a context, all as debug: nothing of it is ours
// to act on (a file system without fs-verity, a connection that did not close).
var routeLogs = sync.OnceFunc(func() {
	entry := bridge(slog.Default())
	entry.Logger.ReplaceHooks(logrus.LevelHooks{})
	entry.Logger.AddHook(slogHook{to: slog.Default(), quiet: true})
	log.L = entry
})

type slogHook struct {
	to    *slog.Logger
	quiet bool
}

func (slogHook) Levels() []logrus.Level { return logrus.AllLevels }

func (h slogHook) Fire(e *logrus.Entry) error {
	level := slog.LevelDebug
	switch {
	case h.quiet:
	case e.Level <= logrus.ErrorLevel:
		level = slog.LevelError
	case e.Level == logrus.WarnLevel:
		level = slog.LevelWarn
	}
	ctx := e.Context
	if ctx == nil {
		ctx = context.Background()
	}
	attrs := make([]slog.Attr, 0, len(e.Data))
	for key, value := range e.Data {
		attrs = append(attrs, slog.Any(key, value))
	}
	h.to.LogAttrs(ctx, level, e.Message, attrs...)
	return nil
}
