package engine

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

func command(t *testing.T) *Code {
	t.Helper()
	c := guest(t, testEngine(t), read(t, "command.wasm"), Host{})
	if c.World() != WorldCommand {
		t.Fatalf("World() = %s, want %s", c.World(), WorldCommand)
	}
	return c
}

func TestCommand(t *testing.T) {
	c, dir := command(t), t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "there"), []byte("was there\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, k := range []struct {
		args     []string
		readOnly bool
		stdin    string
		code     int
		out      string
	}{
		{args: []string{"env", "NAME"}, out: "prog a=b\n"},
		{args: []string{"cat"}, stdin: strings.Repeat("0123456789\n", 50000), out: strings.Repeat("0123456789\n", 50000)},
		{args: []string{"sleep", "1"}}, // longer than the budget, which does not apply to commands
		{args: []string{"exit", "0"}}, {args: []string{"exit", "42"}, code: 42},
		{args: []string{"write", "/data/new", "words"}}, {args: []string{"read", "/data/new"}, out: "words"},
		{args: []string{"write", "/data/no", "words"}, readOnly: true, code: 9},
		{args: []string{"read", "/data/there"}, readOnly: true, out: "was there\n"},
		{args: []string{"read", "/data/../../etc/passwd"}, code: 9}, {args: []string{"read", "/etc/passwd"}, code: 9},
	} {
		// With directories WASI is wasmtime's, otherwise ours.
		for _, dirs := range [][]Preopen{{{Path: dir, Guest: "/data", ReadOnly: k.readOnly}}, nil} {
			if dirs == nil && len(k.args) > 1 && strings.HasPrefix(k.args[1], "/data") {
				continue
			}
			var out bytes.Buffer
			i := instance(t, c, InstanceOptions{
				Args: append([]string{"prog"}, k.args...), Env: []string{"NAME=a=b"}, Stdout: &out, Stdin: strings.NewReader(k.stdin),
				Preopens: dirs, Deadline: 300 * time.Millisecond,
			})
			code, err := i.Run(t.Context())
			if err != nil || code != k.code || out.String() != k.out {
				t.Errorf("%v, %d directories: Run = %d, %v, output of %d bytes %.60q; want %d, %.60q", k.args, len(dirs), code, err, out.Len(),
					out.String(), k.code, k.out)
			}
			if _, err := i.Run(t.Context()); !errors.Is(err, ErrDead) {
				t.Errorf("%v: second Run: error %v, want ErrDead", k.args, err)
			}
		}
	}
}

func TestCommandEnds(t *testing.T) {
	c := command(t)
	run := func(ctx context.Context, o InstanceOptions, args ...string) (time.Duration, error) {
		o.Args = append([]string{"prog"}, args...)
		i := instance(t, c, o)
		start := time.Now()
		_, err := i.Run(ctx)
		return time.Since(start), err
	}
	var trap *Trap
	if _, err := run(t.Context(), InstanceOptions{}, "abort"); !errors.As(err, &trap) || trap.Kind != TrapUnreachable {
		t.Errorf("abort: error %v, want TrapUnreachable", err)
	}
	if _, err := run(t.Context(), InstanceOptions{MaxMemory: 8 << 20}, "eat"); !errors.Is(err, ErrMemory) {
		t.Errorf("eat: error %v, want ErrMemory", err)
	}
	r, w := io.Pipe() // never written
	defer w.Close()
	for _, args := range [][]string{{"spin"}, {"sleep", "600"}, {"cat"}} {
		for _, dirs := range [][]Preopen{nil, {{Path: t.TempDir(), Guest: "/data"}}} {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			took, err := run(ctx, InstanceOptions{Stdin: r, Preopens: dirs}, args...)
			cancel()
			if !errors.Is(err, context.DeadlineExceeded) || took < 30*time.Millisecond || took > soon {
				t.Errorf("%v, %d directories: error %v after %v, want DeadlineExceeded after about 50 ms", args, len(dirs), err, took)
			}
		}
	}
}

func TestCloseWhileRunning(t *testing.T) {
	i := instance(t, command(t), InstanceOptions{Args: []string{"prog", "spin"}})
	done := make(chan error)
	go func() {
		_, err := i.Run(t.Context())
		done <- err
	}()
	for start := i.CPU(); i.CPU() < start+20*time.Millisecond; {
		time.Sleep(time.Millisecond) // pacing: until it runs
	}
	i.Close()
	if err := <-done; !errors.Is(err, ErrKilled) {
		t.Errorf("Run during Close: error %v, want ErrKilled", err)
	}
}

func TestWorldsThatDoNotExist(t *testing.T) {
	c := command(t)
	for name, o := range map[string]InstanceOptions{
		"NUL":          {Args: []string{"a\x00b"}},
		"no directory": {Preopens: []Preopen{{Path: "/does/not/exist", Guest: "/"}}},
		"not UTF-8":    {Args: []string{"\xff"}},
	} {
		if _, err := c.Instantiate(t.Context(), o); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: error %v, want errdefs.ErrInvalidArgument", name, err)
		}
	}
	if _, err := instance(t, theGuest(t), InstanceOptions{}).Run(t.Context()); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Run of a service: error %v, want errdefs.ErrInvalidArgument", err)
	}
}
