package stream_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/crilog"
	"github.com/tripod-run/tripod/internal/stream"
)

// sampleLog has entries of both streams interleaved, and a line in two entries.
const sampleLog = `2026-01-02T03:04:05.000000001Z stdout F one
2026-01-02T03:04:06.000000001Z stderr F two
2026-01-02T03:04:07.000000001Z stdout P thr
2026-01-02T03:04:07.000000002Z stderr F four
2026-01-02T03:04:07.000000003Z stdout F ee
2026-01-02T03:04:08.000000001Z stdout F 
2026-01-02T03:04:09.000000001Z stdout F:tag five
`

func writeFile(t testing.TB, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "0.log")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestReadLogs(t *testing.T) {
	since := func(s string) time.Time {
		at, err := time.Parse(time.RFC3339Nano, s)
		if err != nil {
			t.Fatal(err)
		}
		return at
	}
	for name, c := range map[string]struct {
		opts           stream.LogOptions
		stdout, stderr string
	}{
		"all":        {stream.LogOptions{}, "one\nthree\n\nfive\n", "two\nfour\n"},
		"tail 0":     {stream.LogOptions{TailSet: true}, "", ""},
		"tail 1":     {stream.LogOptions{TailSet: true, Tail: 1}, "five\n", ""},
		"tail 3":     {stream.LogOptions{TailSet: true, Tail: 3}, "ee\n\nfive\n", ""},
		"tail 4":     {stream.LogOptions{TailSet: true, Tail: 4}, "three\n\nfive\n", "four\n"},
		"tail much":  {stream.LogOptions{TailSet: true, Tail: 1000}, "one\nthree\n\nfive\n", "two\nfour\n"},
		"since":      {stream.LogOptions{Since: since("2026-01-02T03:04:07.000000002Z")}, "\nfive\n", "four\n"},
		"since ever": {stream.LogOptions{Since: since("2030-01-01T00:00:00Z")}, "", ""},
		"timestamps": {stream.LogOptions{Timestamps: true, TailSet: true, Tail: 4},
			"2026-01-02T03:04:07.000000001Z three\n2026-01-02T03:04:08.000000001Z \n2026-01-02T03:04:09.000000001Z five\n",
			"2026-01-02T03:04:07.000000002Z four\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			if err := stream.ReadLogs(t.Context(), writeFile(t, sampleLog), c.opts, &stdout, &stderr); err != nil {
				t.Fatal(err)
			}
			if stdout.String() != c.stdout || stderr.String() != c.stderr {
				t.Errorf("stdout = %q, want %q\nstderr = %q, want %q", stdout.String(), c.stdout, stderr.String(), c.stderr)
			}
		})
	}
}

func TestReadLogsOddEnds(t *testing.T) {
	const whole = "2026-01-02T03:04:05.000000001Z stdout F one\n"
	for name, c := range map[string]struct{ log, want string }{
		"no newline at the end": {whole + "2026-01-02T03:04:05.000000001Z stdout F two", "one\ntwo\n"},
		"cut off by a crash":    {whole + "2026-01-02T03:0", "one\n"},
		"piece at the end":      {whole + "2026-01-02T03:04:05.000000001Z stdout P two\n", "one\ntwo"},
		"empty":                 {"", ""},
		"longer than the buffer": {"2026-01-02T03:04:05Z stdout F " + strings.Repeat("x", 200_000) + "\n" + whole,
			strings.Repeat("x", 200_000) + "\none\n"},
		"piece longer than the same": {"2026-01-02T03:04:05Z stdout P " + strings.Repeat("x", 200_000) + "\n" + whole,
			strings.Repeat("x", 200_000) + "one\n"},
		"tag without content":        {"2026-01-02T03:04:05Z stdout F\n", "\n"},
		"zeros after a power loss":   {whole + strings.Repeat("\x00", 5000) + "\n" + whole, "one\none\n"},
		"more zeros than the buffer": {whole + strings.Repeat("\x00", 300_000) + "\n" + whole, "one\none\n"},
		"zeros before an entry":      {whole + "\x00\x00\x00" + whole, "one\none\n"},
		"a cut line, then more":      {"2026-01-02T03:0" + whole + whole, "one\n"},
		"something else":             {"hello\n" + whole, "one\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			if err := stream.ReadLogs(t.Context(), writeFile(t, c.log), stream.LogOptions{}, &out, nil); err != nil {
				t.Fatal(err)
			}
			if out.String() != c.want {
				t.Errorf("stdout = %.80q (%d bytes), want %.80q (%d bytes)", out.String(), out.Len(), c.want, len(c.want))
			}
		})
	}
	var notices []error
	notice := func(err error) { notices = append(notices, err) }
	if err := stream.ReadLogs(t.Context(), writeFile(t, "hello\n"+whole+"hello\n\x00\n"), stream.LogOptions{Notice: notice}, nil,
		nil); err != nil ||
		len(notices) != 1 || !strings.Contains(notices[0].Error(), "hello") {
		t.Errorf("ReadLogs of a log with three bad lines = %v, with the notices %v, want one", err, notices)
	}
	if err := stream.ReadLogs(t.Context(), writeFile(t, "hello\n"), stream.LogOptions{}, nil, nil); !errdefs.IsInvalidArgument(err) {
		t.Errorf("ReadLogs of a file that is not a log = %v, want an invalid argument", err)
	}
	if err := stream.ReadLogs(t.Context(), filepath.Join(t.TempDir(), "0.log"), stream.LogOptions{}, nil, nil); !errdefs.IsNotFound(err) {
		t.Errorf("ReadLogs of a missing file = %v, want not found", err)
	}
}

// TestTailOverBlocks checks a tail that spans many blocks of the backward search.
func TestTailOverBlocks(t *testing.T) {
	var log, lines strings.Builder
	for i := range 20_000 {
		fmt.Fprintf(&log, "2026-01-02T03:04:05Z stdout F line %d\n", i)
		if i >= 20_000-7_000 {
			fmt.Fprintf(&lines, "line %d\n", i)
		}
	}
	var out bytes.Buffer
	opts := stream.LogOptions{TailSet: true, Tail: 7_000}
	if err := stream.ReadLogs(t.Context(), writeFile(t, log.String()), opts, &out, nil); err != nil {
		t.Fatal(err)
	}
	if out.String() != lines.String() {
		t.Errorf("the tail has %d bytes and begins %.20q, want %d bytes and %.20q", out.Len(), out.String(), lines.Len(), lines.String())
	}
}

func openLog(t *testing.T, path string) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o640)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestLogRoundTrip checks that ReadLogs returns what a crilog.Writer wrote, whatever the portions.
func TestLogRoundTrip(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var want [2]bytes.Buffer
	path := filepath.Join(t.TempDir(), "0.log")
	w := crilog.NewWriter(openLog(t, path), 0)
	for i, name := range []string{crilog.Stdout, crilog.Stderr} {
		s := w.Stream(name)
		for range 300 {
			chunk := make([]byte, random.IntN(5000))
			for j := range chunk {
				chunk[j] = byte('a' + random.IntN(26))
				if random.IntN(3000) == 0 {
					chunk[j] = '\n'
				}
			}
			want[i].Write(chunk)
			if n, err := s.Write(chunk); n != len(chunk) || err != nil {
				t.Fatal(n, err)
			}
		}
		s.Write([]byte("end"))
		want[i].WriteString("end\n") // Close adds the newline
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	var got [2]bytes.Buffer
	if err := stream.ReadLogs(t.Context(), path, stream.LogOptions{}, &got[0], &got[1]); err != nil {
		t.Fatal(err)
	}
	for i := range got {
		if !bytes.Equal(got[i].Bytes(), want[i].Bytes()) {
			t.Errorf("stream %d: read %d bytes, want the %d bytes that were written", i, got[i].Len(), want[i].Len())
		}
	}
}

// expecting is a writer whose content a test can wait for.
type expecting struct {
	mu    sync.Mutex
	buf   bytes.Buffer
	grown chan struct{}
}

func newExpecting() *expecting { return &expecting{grown: make(chan struct{}, 1)} }

func (e *expecting) Write(p []byte) (int, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.buf.Write(p)
	select {
	case e.grown <- struct{}{}:
	default:
	}
	return len(p), nil
}

func (e *expecting) String() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.buf.String()
}

// wait waits until ok returns true for everything written so far.
func (e *expecting) wait(t *testing.T, ok func(string) bool) {
	t.Helper()
	timeout := time.After(20 * time.Second)
	for !ok(e.String()) {
		select {
		case <-e.grown:
		case <-timeout:
			t.Fatalf("wrote only %.200q within 20 s", e.String())
		}
	}
}

func (e *expecting) waitFor(t *testing.T, want string) {
	t.Helper()
	e.wait(t, func(s string) bool { return s == want })
}

// TestFollowAcrossRotation checks that a follower gets every line once while the log is rotated as the kubelet does:
// rename, then reopen.
func TestFollowAcrossRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	w := crilog.NewWriter(openLog(t, path), 0)
	defer w.Close()
	s, out, ended := w.Stream(crilog.Stdout), newExpecting(), make(chan struct{})
	fmt.Fprintln(s, "before")
	done := make(chan error, 1)
	go func() {
		done <- stream.ReadLogs(t.Context(), path, stream.LogOptions{Follow: true, Ended: ended}, out, nil)
	}()
	want := "before\n"
	out.waitFor(t, want)
	for i := range 5 {
		if err := os.Rename(path, fmt.Sprintf("%s.%d", path, i)); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(s, "into the renamed file", i)
		want += fmt.Sprintln("into the renamed file", i)
		if i%2 == 0 {
			out.waitFor(t, want)
		}
		if err := w.Replace(openLog(t, path)); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintln(s, "into the new file", i)
		want += fmt.Sprintln("into the new file", i)
		out.waitFor(t, want)
	}
	fmt.Fprintln(s, "last words")
	close(ended)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	out.waitFor(t, want+"last words\n")
}

// TestFollowUntilTheWriterSwitches checks that a follower gets what is written to the renamed file after the next file
// exists: the kubelet's rotation creates the file first, and the writer switches to it later.
func TestFollowUntilTheWriterSwitches(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	w := crilog.NewWriter(openLog(t, path), 0)
	defer w.Close()
	s, out, ended := w.Stream(crilog.Stdout), newExpecting(), make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- stream.ReadLogs(t.Context(), path, stream.LogOptions{Follow: true, Ended: ended}, out, nil)
	}()
	want := ""
	say := func(format string, args ...any) {
		fmt.Fprintf(s, format, args...)
		want += fmt.Sprintf(format, args...)
	}
	say("before\n")
	for i := range 30 {
		out.waitFor(t, want)
		if err := os.Rename(path, fmt.Sprintf("%s.%d", path, i)); err != nil {
			t.Fatal(err)
		}
		next := openLog(t, path)
		for range i {
			say("into the renamed file %d\n", i)
		}
		if err := w.Replace(next); err != nil {
			t.Fatal(err)
		}
		say("into the next file %d\n", i)
	}
	close(ended)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	out.waitFor(t, want)
}

// TestFollowHalfAnEntry checks that a follower waits for the rest of an entry, handles truncation, and ends with its
// context.
func TestFollowHalfAnEntry(t *testing.T) {
	path := writeFile(t, "2026-01-02T03:04:05Z stdout F one\n2026-01-02T03:04")
	out, done := newExpecting(), make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { done <- stream.ReadLogs(ctx, path, stream.LogOptions{Follow: true}, out, nil) }()
	out.waitFor(t, "one\n")
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	f.WriteString(":06Z stdout F two\n")
	out.waitFor(t, "one\ntwo\n")
	if err := f.Truncate(0); err != nil {
		t.Fatal(err)
	}
	f.WriteString("2026-01-02T03:04:07Z stdout F three\n")
	out.waitFor(t, "one\ntwo\nthree\n")
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("ReadLogs = %v, want context.Canceled", err)
	}
}

// TestFollowAfterZeros: zeros at the end of a file, which a power loss left, hide nothing of the file that follows it.
func TestFollowAfterZeros(t *testing.T) {
	for name, first := range map[string]string{"after an entry": "2026-01-02T03:04:05Z stdout F one\n" + strings.Repeat("\x00", 200_000),
		"alone": "\x00\x00\n"} {
		path := writeFile(t, first)
		out, done, ended, read := newExpecting(), make(chan error, 1), make(chan struct{}), make(chan struct{})
		opts := stream.LogOptions{Follow: true, Ended: ended, Notice: func(error) { close(read) }}
		go func() { done <- stream.ReadLogs(t.Context(), path, opts, out, nil) }()
		<-read
		if err := errors.Join(os.Rename(path, path+".1"), os.WriteFile(path, []byte("2026-01-02T03:04:06Z stdout F two\n"), 0o600)); err != nil {
			t.Fatal(err)
		}
		want := "two\n"
		if name != "alone" {
			want = "one\ntwo\n"
		}
		out.waitFor(t, want)
		close(ended)
		if err := <-done; err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzReadLogs checks that reading any file does not panic, and returns no more bytes than the file has.
func FuzzReadLogs(f *testing.F) {
	f.Add([]byte(sampleLog), 2)
	f.Add([]byte("2026-01-02T03:04:05Z stdout F\n"), 1)
	f.Add([]byte("\n\n\n"), 0)
	f.Add([]byte("2026-01-02T03:04:05Z stderr P:F:x y"), 3)
	path := filepath.Join(f.TempDir(), "0.log")
	f.Fuzz(func(t *testing.T, log []byte, tail int) {
		if line, err := crilog.Parse(log); err == nil &&
			(line.Stream != crilog.Stdout && line.Stream != crilog.Stderr || len(line.Content) > len(log)) {
			t.Errorf("Parse(%q) = %+v, want stdout or stderr, and content from the input", log, line)
		}
		if err := os.WriteFile(path, log, 0o600); err != nil {
			t.Fatal(err)
		}
		var out, part bytes.Buffer
		err := stream.ReadLogs(t.Context(), path, stream.LogOptions{}, &out, &out)
		if err != nil && !errdefs.IsInvalidArgument(err) {
			t.Fatal(err)
		}
		if out.Len() > len(log) {
			t.Errorf("ReadLogs wrote %d bytes, want at most the %d bytes of the log", out.Len(), len(log))
		}
		if err != nil {
			return
		}
		if err := stream.ReadLogs(t.Context(), path, stream.LogOptions{TailSet: true, Tail: tail}, &part, &part); err != nil {
			t.Fatalf("ReadLogs of the tail = %v, although the whole log can be read", err)
		}
		if !strings.HasSuffix(out.String(), part.String()) {
			t.Errorf("the tail %q is not a suffix of the log %q", part.String(), out.String())
		}
	})
}
