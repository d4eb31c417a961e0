package crilog_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/crilog"
)

func openLog(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o640)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestPieces(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	w := crilog.NewWriter(openLog(t, path))
	s := w.Stream(crilog.Stdout)
	s.Write([]byte(strings.Repeat("a", crilog.MaxPiece) + "\n")) // just fits
	s.Write([]byte(strings.Repeat("b", crilog.MaxPiece+1)))
	s.Write([]byte("\n"))
	s.Close()
	w.Close()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(string(content)) {
		l, err := crilog.Parse([]byte(line))
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprintf("%.1s×%d %t", l.Content, len(l.Content), l.Partial))
		if time.Since(l.Time) > time.Minute || l.Stream != crilog.Stdout {
			t.Errorf("entry of %v on %s", l.Time, l.Stream)
		}
	}
	if want := "a×16384 false,b×16384 true,b×1 false"; strings.Join(got, ",") != want {
		t.Errorf("entries %v, want %s", got, want)
	}
}

func TestWriterIsClosed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	w := crilog.NewWriter(openLog(t, path))
	w.Close()
	if _, err := w.Stream(crilog.Stdout).Write([]byte("x\n")); !errors.Is(err, os.ErrClosed) {
		t.Errorf("a write after Close: %v", err)
	}
	file := openLog(t, path)
	if err := w.Replace(file); !errors.Is(err, os.ErrClosed) {
		t.Errorf("a rotation after Close: %v", err)
	}
	if err := file.Close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("the file that was refused is open still: %v", err)
	}
}

func TestParseRefuses(t *testing.T) {
	for _, line := range []string{
		"", "\n", "hello", "2026-01-02T03:04:05Z", "2026-01-02T03:04:05Z stdout", "2026-01-02T03:04:05Z stdin F x",
		"2026-01-02T03:04:05Z stdout X x", "yesterday stdout F x", "2026-01-02T03:04:05Z  stdout F x",
	} {
		if l, err := crilog.Parse([]byte(line)); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%q passed as %+v, %v", line, l, err)
		}
	}
}
