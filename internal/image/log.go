package image

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math"
	"sync"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/log"
	"github.com/sirupsen/logrus"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// bridge returns a logger for containerd's libraries, which use logrus. It forwards all lines to slog. Info lines
// become debug lines, because the libraries write one per request.
func bridge(to *slog.Logger) *log.Entry {
	l := logrus.New()
	l.SetOutput(io.Discard)
	l.SetLevel(logrus.InfoLevel)
	l.AddHook(slogHook{to: to})
	return logrus.NewEntry(l)
}

// setGlobals sets two process-wide variables of containerd's libraries. Log lines without a context go to slog.Default
// at debug level, because none of these lines needs action. They are, for example, about a file system without
// fs-verity, or a connection that did not close. The size limit for manifests is enforced in this package instead, with
// the right error class.
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
	if !h.to.Enabled(ctx, level) {
		return nil
	}
	attrs := make([]slog.Attr, 0, len(e.Data))
	for key, value := range e.Data {
		switch value.(type) {
		case string, error, fmt.Stringer: // may have URLs
			value = failure.WithoutQueries(fmt.Sprint(value))
		}
		attrs = append(attrs, slog.Any(key, value))
	}
	h.to.LogAttrs(ctx, level, failure.WithoutQueries(e.Message), attrs...)
	return nil
}
