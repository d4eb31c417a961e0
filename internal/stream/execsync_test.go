package stream_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/stream"
)

func TestExecSync(t *testing.T) {
	rt := fakeRuntime{exec: func(ctx context.Context, id string, req sandbox.ExecRequest) (int32, error) {
		if id != "c1" || strings.Join(req.Cmd, " ") != "prog arg" || req.Stdin != nil || req.TTY {
			t.Errorf("Exec(%s, %+v), want \"prog arg\" in c1 without stdin and terminal", id, req)
		}
		if _, ok := ctx.Deadline(); ok {
			t.Error("the context has a deadline, want none without a timeout")
		}
		fmt.Fprint(req.Stdout, "out")
		fmt.Fprint(req.Stderr, "err")
		return 3, nil
	}}
	resp, err := stream.ExecSync(t.Context(), rt, "c1", []string{"prog", "arg"}, 0)
	if err != nil || string(resp.Stdout) != "out" || string(resp.Stderr) != "err" || resp.ExitCode != 3 {
		t.Errorf("ExecSync = %v, %v, want stdout \"out\", stderr \"err\" and code 3", resp, err)
	}
}

func TestExecSyncTimesOut(t *testing.T) {
	killed := false
	rt := fakeRuntime{exec: func(ctx context.Context, _ string, _ sandbox.ExecRequest) (int32, error) {
		<-ctx.Done()
		killed = true
		return 137, nil
	}}
	start := time.Now()
	resp, err := stream.ExecSync(t.Context(), rt, "c1", []string{"sleep", "1000"}, 50*time.Millisecond)
	if !errdefs.IsDeadlineExceeded(err) || !strings.Contains(err.Error(), "timed out") || resp != nil {
		t.Errorf("ExecSync = %v, %v, want no response and DeadlineExceeded", resp, err)
	}
	if !killed || time.Since(start) > 10*time.Second {
		t.Errorf("program killed = %t after %s, want true within 10 s", killed, time.Since(start))
	}
	// The end of the caller's context is not a timeout of the program.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	rt.exec = func(ctx context.Context, _ string, _ sandbox.ExecRequest) (int32, error) { return 0, ctx.Err() }
	if _, err := stream.ExecSync(ctx, rt, "c1", []string{"sleep"}, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("ExecSync with a cancelled context = %v, want context.Canceled", err)
	}
}

func TestExecSyncErrors(t *testing.T) {
	rt := fakeRuntime{exec: func(context.Context, string, sandbox.ExecRequest) (int32, error) { return 0, errdefs.ErrNotFound }}
	if resp, err := stream.ExecSync(t.Context(), rt, "c1", []string{"true"}, 0); !errdefs.IsNotFound(err) || resp != nil {
		t.Errorf("ExecSync = %v, %v, want no response and not found", resp, err)
	}
	for name, call := range map[string]func() error{
		"no container": func() error { _, err := stream.ExecSync(t.Context(), rt, "", []string{"true"}, 0); return err },
		"no command":   func() error { _, err := stream.ExecSync(t.Context(), rt, "c1", nil, 0); return err },
		"timeout -1 s": func() error {
			_, err := stream.ExecSync(t.Context(), rt, "c1", []string{"true"}, -time.Second)
			return err
		},
	} {
		if err := call(); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: ExecSync = %v, want an invalid argument", name, err)
		}
	}
}

// TestExecSyncFloodC4 checks that a program with too much output runs to its end, that the returned output fits into a
// message, and that stderr mentions the dropped part.
func TestExecSyncFloodC4(t *testing.T) {
	const flood = 40 << 20
	rt := fakeRuntime{exec: func(_ context.Context, _ string, req sandbox.ExecRequest) (int32, error) {
		fmt.Fprint(req.Stderr, "warning\n")
		for range flood >> 20 {
			if n, err := req.Stdout.Write(bytes.Repeat([]byte("y"), 1<<20)); n != 1<<20 || err != nil {
				t.Errorf("the program's Write = %d, %v, want all bytes to be accepted", n, err)
			}
		}
		return 0, nil
	}}
	resp, err := stream.ExecSync(t.Context(), rt, "c1", []string{"yes"}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(resp.Stdout) + len(resp.Stderr); n < stream.MaxExecSyncOutput || n >= 16<<20 {
		t.Errorf("ExecSync returned %d bytes of output, want at least %d and less than 16 MiB", n, stream.MaxExecSyncOutput)
	}
	dropped := flood + len("warning\n") - stream.MaxExecSyncOutput
	if s := string(resp.Stderr); !strings.HasPrefix(s, "warning\n") || !strings.Contains(s, fmt.Sprintf("%d bytes", dropped)) {
		t.Errorf("stderr = %q, want the warning and a mention of %d dropped bytes", s, dropped)
	}
}

// TestExecSyncLateWriterC4 checks that a child process that writes after the program's end does not change the result.
func TestExecSyncLateWriterC4(t *testing.T) {
	var late io.Writer
	rt := fakeRuntime{exec: func(_ context.Context, _ string, req sandbox.ExecRequest) (int32, error) {
		late = req.Stdout
		fmt.Fprint(req.Stdout, "early")
		return 0, nil
	}}
	resp, err := stream.ExecSync(t.Context(), rt, "c1", []string{"prog"}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := fmt.Fprint(late, "late"); n != 4 || err != nil {
		t.Errorf("late Write = %d, %v, want 4, nil", n, err)
	}
	if string(resp.Stdout) != "early" {
		t.Errorf("stdout = %q, want \"early\"", resp.Stdout)
	}
}
