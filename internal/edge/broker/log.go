package broker

import (
	"context"
	"log/slog"
)

// quietHandler lowers all of mochi's messages except errors to the level debug, because a client that disconnects is
// not worth a warning. It removes the attributes that hold whole packets, because the content of packets must not be
// logged.
type quietHandler struct{ slog.Handler }

func quiet(l *slog.Logger) *slog.Logger { return slog.New(quietHandler{l.Handler()}) }

func (q quietHandler) Enabled(ctx context.Context, level slog.Level) bool {
	return q.Handler.Enabled(ctx, lowered(level))
}

func (q quietHandler) Handle(ctx context.Context, r slog.Record) error {
	out := slog.NewRecord(r.Time, lowered(r.Level), "broker: "+r.Message, r.PC)
	r.Attrs(func(a slog.Attr) bool {
		if a.Key != "pk" && a.Key != "packet" && a.Key != "will" {
			out.AddAttrs(a)
		}
		return true
	})
	return q.Handler.Handle(ctx, out)
}

func (q quietHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return quietHandler{q.Handler.WithAttrs(attrs)}
}

func (q quietHandler) WithGroup(name string) slog.Handler {
	return quietHandler{q.Handler.WithGroup(name)}
}

func lowered(level slog.Level) slog.Level {
	if level < slog.LevelError {
		return slog.LevelDebug
	}
	return level
}
