package image

import (
	"context"
	"io"
	"log/slog"
	"math"
	"sync"

	"github.com/containerd/containerd/v2/core/remotes/docker"
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

// setGlobals sets the two variables that containerd's libraries have for the whole process. What they log without a
// context goes where slog.Default goes, as debug: nothing of it is ours to act on (a file system without fs-verity, a
// connection that did not close). And the size of manifests is limited here, where it gets the right class of error.
var setGlobals = sync.OnceFunc(func() {
	entry := bridge(slog.Default())
	entry.Logger.ReplaceHooks(logrus.LevelHooks{})
	entry.Logger.AddHook(slogHook{to: slog.Default(), quiet: true})
	log.L = entry
	docker.MaxManifestSize = math.MaxInt64
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
