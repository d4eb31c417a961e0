package stream

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/go-logr/logr"
)

// TestQuietLibrary: what a library that uses klog calls an error is a debug message of ours, and is not printed at level info.
func TestQuietLibrary(t *testing.T) {
	for level, want := range map[slog.Level]string{slog.LevelInfo: "", slog.LevelDebug: "level=DEBUG"} {
		var out bytes.Buffer
		// klog.SetSlogLogger makes such a logger.
		log := logr.FromSlogHandler(quiet{slog.NewTextHandler(&out, &slog.HandlerOptions{Level: level})})
		log.Error(errors.New("the client hung up"), "Unhandled Error")
		log.Info("something")
		if got := out.String(); (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("at level %s: got %q, want %q", level, got, want)
		}
	}
}
