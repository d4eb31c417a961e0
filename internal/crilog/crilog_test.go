package crilog_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
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
	w := crilog.NewWriter(openLog(t, path), 0)
	s := w.Stream(crilog.Stdout)
	s.Write([]byte(strings.Repeat("a", crilog.MaxPiece) + "\n")) // the longest line that fits into an entry
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
			t.Errorf("entry has time %v and stream %s, want the current time and stdout", l.Time, l.Stream)
		}
	}
	if want := "a×16384 false,b×16384 true,b×1 false"; strings.Join(got, ",") != want {
		t.Errorf("entries are %v, want %s", got, want)
	}
}

// TestTerminalIsWrittenAtOnce: a prompt is in the log before its line is complete.
func TestTerminalIsWrittenAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	w := crilog.NewWriter(openLog(t, path), 0)
	defer w.Close()
	s := w.Terminal(crilog.Stdout)
	defer s.Close()
	for _, text := range []string{"\nlogin: ", "root\n"} {
		before, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Write([]byte(text)); err != nil {
			t.Fatal(err)
		}
		after, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		entries := slices.Collect(strings.Lines(string(after[len(before):])))
		last, err := crilog.Parse([]byte(entries[len(entries)-1]))
		if partial := !strings.HasSuffix(text, "\n"); err != nil || last.Partial != partial || string(last.Content) != strings.Trim(text, "\n") {
			t.Errorf("after %q: the last entry is %q, partial %t, error %v", text, last.Content, last.Partial, err)
		}
	}
}

// TestFaultC10FullLog checks that lines beyond the size limit are dropped until the log is rotated.
func TestFaultC10FullLog(t *testing.T) {
	dir := t.TempDir()
	const most = 10 << 10
	w := crilog.NewWriter(openLog(t, filepath.Join(dir, "0.log")), most)
	defer w.Close()
	s := w.Stream(crilog.Stdout)
	lost := 0
	for range 1000 {
		if _, err := s.Write([]byte("one line of a flood\n")); errors.Is(err, crilog.ErrFull) {
			lost++
		} else if err != nil {
			t.Fatal(err)
		}
	}
	info, err := os.Stat(filepath.Join(dir, "0.log"))
	if err != nil || info.Size() > most || info.Size() < most/2 || lost == 0 {
		t.Errorf("the log has %d bytes and %d lines were lost, %v, want at most %d bytes and some lines lost", info.Size(), lost, err, most)
	}
	if err := w.Replace(openLog(t, filepath.Join(dir, "1.log"))); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Write([]byte("after the rotation\n")); err != nil {
		t.Error(err)
	}
	if next, err := os.ReadFile(filepath.Join(dir, "1.log")); err != nil || !strings.HasSuffix(string(next), "after the rotation\n") {
		t.Errorf("the new log contains %q, %v, want the line written after the rotation", next, err)
	}
}

func TestWriterIsClosed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	w := crilog.NewWriter(openLog(t, path), 0)
	w.Close()
	if _, err := w.Stream(crilog.Stdout).Write([]byte("x\n")); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Write after Close = %v, want ErrClosed", err)
	}
	file := openLog(t, path)
	if err := w.Replace(file); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Replace after Close = %v, want ErrClosed", err)
	}
	if err := file.Close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Replace after Close left the new file open: closing it = %v, want ErrClosed", err)
	}
}

func TestParseRefuses(t *testing.T) {
	for _, line := range []string{
		"", "\n", "hello", "2026-01-02T03:04:05Z", "2026-01-02T03:04:05Z stdout", "2026-01-02T03:04:05Z stdin F x",
		"2026-01-02T03:04:05Z stdout X x", "yesterday stdout F x", "2026-01-02T03:04:05Z  stdout F x",
	} {
		if l, err := crilog.Parse([]byte(line)); !errdefs.IsInvalidArgument(err) {
			t.Errorf("Parse(%q) = %+v, %v, want an invalid argument", line, l, err)
		}
	}
}
