package program

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

func TestCommandsEnd(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	for name, c := range map[string]struct {
		args           []string
		code           int32
		reason         string
		stdout, stderr string
	}{
		"completed": {[]string{"args", "out", "hello"}, 0, "Completed", "command-go\nargs\nout\nhello\nhello\n", ""},
		"own code":  {[]string{"err", "oh", "exit", "42"}, 42, "Error", "", "oh\n"},
		"panic":     {[]string{"panic"}, 2, "Error", "", "panic: asked to"},
		"no stdin":  {[]string{"stdin", "out", "end"}, 0, "Completed", "end\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := r.command(nil, c.args...)
			end := p.exit()
			require.Equal(t, c.code, end.ExitCode, "%+v", end)
			require.Equal(t, c.reason, end.Reason)
			require.False(t, end.FinishedAt.Before(end.StartedAt))
			require.Equal(t, c.stdout, p.logged("stdout"))
			require.True(t, strings.HasPrefix(p.logged("stderr"), c.stderr), p.logged("stderr"))
		})
	}
}

func TestCommandWithFiles(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	dir := t.TempDir()
	require.NoError(t, os.Chmod(dir, 0o777))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "\xff"), nil, 0o600))
	p := r.command(func(s *workerapi.PodSpec) {
		d, err := os.Open(dir)
		require.NoError(t, err)
		s.Mounts = []workerapi.Mount{{Guest: "/data", Dir: workerapi.File{File: d}}}
		s.Env = []string{"A=b c"}
	}, "env", "A", "write", "/data/f", "text", "cat", "/data/f", "ls", "/data")
	require.Zero(t, p.exit().ExitCode, p.logged("stderr"))
	require.Equal(t, "b c\ntext\nf\n", p.logged("stdout"))
	require.Contains(t, p.logged("stderr"), "names that are not UTF-8: 1 of its entries")
	written, err := os.ReadFile(filepath.Join(dir, "f"))
	require.NoError(t, err)
	require.Equal(t, "text\n", string(written))
}

func TestCommandIsKilled(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	for _, args := range [][]string{{"spin"}, {"sleep", "1h"}} {
		t.Run(args[0], func(t *testing.T) {
			p := r.command(nil, args...)
			begun := time.Now()
			end, err := r.Stop(t.Context(), p.ID, 200*time.Millisecond)
			require.NoError(t, err)
			require.Equal(t, int32(137), end.ExitCode)
			require.Equal(t, "Error", end.Reason)
			require.Contains(t, end.Message, "grace")
			require.GreaterOrEqual(t, time.Since(begun), 200*time.Millisecond)
			require.Less(t, time.Since(begun), 5*time.Second)
			require.Equal(t, end, p.exit())
		})
	}
}

func TestCommandOutOfMemory(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	_, err := r.tryCommand(func(s *workerapi.PodSpec) { s.Resources.MemoryBytes = 64 << 10 }, "out", "x")
	require.True(t, errdefs.IsResourceExhausted(err), "%v", err)
}

// TestStdin checks that a command reads the input of attached clients, and gets end of file from Stop.
func TestStdin(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.command(func(s *workerapi.PodSpec) { s.Stdin = true }, "stdin", "out", "bye")
	for _, text := range []string{"one\n", "two\n"} { // from one client each, in sequence
		pr, pw := io.Pipe()
		ctx, cancel := context.WithCancel(t.Context())
		out := &watched{}
		attached := make(chan error, 1)
		go func() { attached <- r.Attach(ctx, p.ID, workerapi.AttachIO{Stdin: pr, Stdout: out}) }()
		_, err := io.WriteString(pw, text)
		require.NoError(t, err)
		out.wait(t, text)
		cancel()
		require.ErrorIs(t, <-attached, context.Canceled)
		pr.Close()
	}
	end, err := r.Stop(t.Context(), p.ID, time.Minute)
	require.NoError(t, err)
	require.Zero(t, end.ExitCode)
	require.Equal(t, "one\ntwo\nbye\n", p.logged("stdout"))
}

func TestStdinOnce(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.command(func(s *workerapi.PodSpec) { s.Stdin, s.StdinOnce = true, true }, "stdin", "out", "bye", "err", "too")
	var out, stderr bytes.Buffer
	require.NoError(t, r.Attach(t.Context(), p.ID, workerapi.AttachIO{Stdin: strings.NewReader("all"), Stdout: &out, Stderr: &stderr}))
	require.Equal(t, "allbye\n", out.String())
	require.Equal(t, "too\n", stderr.String())
	require.Zero(t, p.exit().ExitCode)
	err := r.Attach(t.Context(), p.ID, workerapi.AttachIO{Stdout: &out})
	require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
}

func TestTTYJoinsTheStreams(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.command(func(s *workerapi.PodSpec) { s.TTY = true }, "out", "a", "err", "b")
	p.exit()
	require.Equal(t, "a\nb\n", p.logged("stdout"))
	require.Empty(t, p.logged("stderr"))
}

// TestSlowClientIsCutOff checks that a client that does not read is disconnected, and that other clients get all
// output.
func TestSlowClientIsCutOff(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.serve("faults-c")
	s := p.faults()
	reader := &watched{}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	read, stuck := make(chan error, 1), make(chan error, 1)
	go func() { read <- r.Attach(ctx, p.ID, workerapi.AttachIO{Stdout: reader}) }()
	hold := &blocked{begun: make(chan struct{}), until: make(chan struct{})}
	go func() { stuck <- r.Attach(ctx, p.ID, workerapi.AttachIO{Stdout: hold}) }()
	eventually(t, "both are attached", func() bool {
		s.must("Print", `{"stdout":"begin"}`)
		return reader.len() > 0 && hold.hasBegun()
	})
	line := strings.Repeat("x", 1000)
	const rounds = 60 // of 100 KB each, which exceeds a client's backlog
	for range rounds {
		before := reader.len()
		s.must("Print", `{"stdout":"`+line+`","times":100}`)
		eventually(t, "who reads is not cut off", func() bool { return reader.len() >= before+100*len(line) })
	}
	close(hold.until)
	require.NoError(t, <-stuck, "the session is over, the pod is not")
	s.must("Print", `{"stdout":"end"}`)
	reader.wait(t, "end\n")
	require.Greater(t, reader.len(), rounds*100*len(line))
	require.True(t, strings.HasSuffix(p.logged("stdout"), reader.text()), "the client must get all output after it was attached")
	cancel()
	require.ErrorIs(t, <-read, context.Canceled)
}

// TestC5_ClientsVanish checks that a thousand clients that disconnect leave nothing in the worker.
func TestC5_ClientsVanish(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.command(func(s *workerapi.PodSpec) { s.Stdin = true }, "sleep", "1h")
	files := func() int {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", r.process.Pid))
		require.NoError(t, err)
		return len(entries)
	}
	before := files()
	for range 50 {
		var all sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		for range 20 {
			all.Go(func() {
				_ = r.Attach(ctx, p.ID, workerapi.AttachIO{Stdin: strings.NewReader("unread"), Stdout: io.Discard})
			})
		}
		eventually(t, "they are attached", func() bool { return files() > before })
		cancel()
		all.Wait()
	}
	eventually(t, "nothing of them is left", func() bool { return files() <= before })
	require.NoError(t, r.Kill(t.Context(), p.ID))
}

func TestReopenLog(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.serve("faults-c")
	s := p.faults()
	s.must("Print", `{"stdout":"old"}`)
	require.NoError(t, os.Rename(p.log, p.log+".1"))
	file := openLog(t, p.log)
	require.NoError(t, r.ReopenLog(t.Context(), p.ID, file))
	file.Close()
	s.must("Print", `{"stdout":"new","stderr":"a line"}`)
	require.Equal(t, "new\n", p.logged("stdout"))
	require.Equal(t, "a line\n", p.logged("stderr"))
	old := &pod{rig: r, log: p.log + ".1"}
	require.Equal(t, "old\n", old.logged("stdout"))
}

// watched is a writer whose content a test can wait for.
type watched struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (w *watched) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buf.Write(p)
}

func (w *watched) wait(t *testing.T, suffix string) {
	t.Helper()
	eventually(t, suffix, func() bool { return strings.HasSuffix(w.text(), suffix) })
}

func (w *watched) text() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buf.String()
}

func (w *watched) len() int { return len(w.text()) }

// blocked is a writer that blocks until it is released.
type blocked struct {
	once         sync.Once
	begun, until chan struct{}
}

func (b *blocked) Write(p []byte) (int, error) {
	b.once.Do(func() { close(b.begun) })
	<-b.until
	return len(p), nil
}

func (b *blocked) hasBegun() bool {
	select {
	case <-b.begun:
		return true
	default:
		return false
	}
}
