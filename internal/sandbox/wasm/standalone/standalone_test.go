package standalone

import (
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/test/workertest"
)

func TestMain(m *testing.M) { workertest.Main(m) }

// start starts a component with the given words, whose files are in the returned directory.
func start(ctx context.Context, t *testing.T, words string) (*Worker, string, error) {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	s, err := Start(ctx, Config{Program: workertest.Program, UID: 65529, GID: 65529}, Guest{Name: "solo", Wasm: workertest.Module(words)})
	return s, dir, err
}

// gone checks that nothing is left of a standalone component.
func gone(t *testing.T, dir string) {
	t.Helper()
	if files, err := filepath.Glob(dir + "/*"); err != nil || len(files) > 0 {
		t.Errorf("files left behind: %v, error %v", files, err)
	}
	if pids := append(workertest.Pids(workertest.Program, "worker"), workertest.CompilerPids(workertest.Program)...); len(pids) > 0 {
		t.Errorf("processes left behind: %v", pids)
	}
}

// TestStandalone: a component answers on loopback without a node, its output can be read, and nothing is left of it.
func TestStandalone(t *testing.T) {
	s, dir, err := start(t.Context(), t, "world=grpc")
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.DialTimeout("tcp", s.Address.String(), 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if got, err := io.ReadAll(conn); err != nil || string(got) != "hello\n" {
		t.Errorf("greeting: got %q, error %v", got, err)
	}
	if out, err := s.Output(100); err != nil || string(out) != "started solo\n" {
		t.Errorf("output: got %q, error %v, want the start", out, err)
	}
	if out, err := s.Output(5); err != nil || string(out) != "solo\n" {
		t.Errorf("output of 5 bytes: got %q, error %v, want the end", out, err)
	}
	if files, err := filepath.Glob(dir + "/*"); err != nil || len(files) > 0 {
		t.Errorf("files that would remain if this process were killed: %v, error %v", files, err)
	}
	workers := workertest.Pids(workertest.Program, "worker")
	if len(workers) != 1 {
		t.Errorf("workers: got %v, want one", workers)
	}
	for _, pid := range workers {
		if info, err := os.ReadFile(filepath.Join("/proc", pid, "status")); err != nil || !strings.Contains(string(info), "Uid:\t65529\t65529") {
			t.Errorf("worker %s: error %v, want user 65529:\n%s", pid, err, info)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	gone(t, dir)
}

func TestStandaloneRefused(t *testing.T) {
	for words, want := range map[string]string{"invalid": "unknown import", "mismatch": "result: string"} {
		_, dir, err := start(t.Context(), t, words)
		if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want ErrInvalidArgument with %q", words, err, want)
		}
		gone(t, dir)
	}
}

// TestStandaloneIsCancelled: the end of the context ends the compiler and the worker.
func TestStandaloneIsCancelled(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, dir, err := start(ctx, t, "slow"); err == nil || ctx.Err() == nil {
		t.Errorf("slow compilation: got %v, want the end of the context", err)
	} else {
		gone(t, dir)
	}
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	s, dir, err := start(ctx, t, "world=grpc")
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	<-s.exited
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	gone(t, dir)
}
