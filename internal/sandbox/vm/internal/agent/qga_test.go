package agent_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
)

// qemuGA starts a fake qemu-guest-agent on a socket that serves one client at a time, and returns the socket's path.
func qemuGA(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "qga.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	running := map[int]*guestProgram{}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Write([]byte("{\"return\": 77}\n")) // a late answer to an earlier client
			in := bufio.NewReader(c)
			for {
				line, err := in.ReadBytes('\n')
				if err != nil {
					break
				}
				if answer := answerGA(t, running, bytes.TrimLeft(line, "\xff")); answer != nil {
					c.Write(append(answer, '\n'))
				}
			}
			c.Close()
		}
	}()
	return path
}

type guestProgram struct {
	cmd      *exec.Cmd
	out, err bytes.Buffer
	done     chan struct{}
}

func answerGA(t *testing.T, running map[int]*guestProgram, line []byte) []byte {
	var request struct {
		Execute   string
		Arguments struct {
			ID    int64    `json:"id"`
			Pid   int      `json:"pid"`
			Path  string   `json:"path"`
			Arg   []string `json:"arg"`
			Env   []string `json:"env"`
			Input []byte   `json:"input-data"`
		}
	}
	if err := json.Unmarshal(line, &request); err != nil {
		t.Errorf("request %s: %v", line, err)
		return nil
	}
	reply := func(v any) []byte {
		b, _ := json.Marshal(map[string]any{"return": v})
		return b
	}
	a := request.Arguments
	switch request.Execute {
	case "guest-ping":
		return reply(struct{}{})
	case "guest-sync-delimited":
		return append([]byte{0xff}, reply(a.ID)...)
	case "guest-exec":
		p := &guestProgram{cmd: exec.Command(a.Path, a.Arg...), done: make(chan struct{})}
		p.cmd.Env, p.cmd.Stdin, p.cmd.Stdout, p.cmd.Stderr = a.Env, bytes.NewReader(a.Input), &p.out, &p.err
		if err := p.cmd.Start(); err != nil {
			return []byte(`{"error": {"class": "GenericError", "desc": "Guest agent command failed, error was 'Failed to execute child process'"}}`)
		}
		go func() { p.cmd.Wait(); close(p.done) }()
		running[p.cmd.Process.Pid] = p
		return reply(map[string]any{"pid": p.cmd.Process.Pid})
	case "guest-exec-status":
		p := running[a.Pid]
		select {
		case <-p.done:
		default:
			return reply(map[string]any{"exited": false})
		}
		status := map[string]any{"exited": true, "out-data": p.out.Bytes(), "err-data": p.err.Bytes()}
		if code := p.cmd.ProcessState.ExitCode(); code >= 0 {
			status["exitcode"] = code
		} else {
			status["signal"] = 9
		}
		return reply(status)
	}
	return []byte(`{"error": {"class": "CommandNotFound", "desc": "no"}}`)
}

func TestQGA(t *testing.T) {
	q := agent.OpenQGA(qemuGA(t))
	if err := q.Ping(deadline(t)); err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	cmd := command(strings.NewReader("input"), &out, &errOut, "sh", "-c", "cat; echo $A >&2; pwd; exit 3")
	cmd.Env, cmd.Dir = []string{"A=b"}, "/tmp"
	if code, err := q.ExecSync(deadline(t), cmd); err != nil || code != 3 || out.String() != "input/tmp\n" || errOut.String() != "b\n" {
		t.Errorf("ExecSync = %d, %v with stdout %q, stderr %q; want 3 with \"input/tmp\", \"b\"", code, err, out.String(), errOut.String())
	}
	if code, err := q.ExecSync(deadline(t), command(nil, nil, nil, "sh", "-c", "kill -9 $$")); err != nil || code != 137 {
		t.Errorf("ExecSync of a killed program = %d, %v; want 137, nil", code, err)
	}
	if _, err := q.ExecSync(deadline(t), command(nil, nil, nil, "/no/such/program")); !errdefs.IsInvalidArgument(err) {
		t.Errorf("ExecSync of a missing program: error = %v, want ErrInvalidArgument", err)
	}
	tty, other := command(nil, nil, nil, "true"), command(nil, nil, nil, "true")
	tty.TTY, other.User = true, "nobody"
	large := command(bytes.NewReader(make([]byte, 2<<20)), nil, nil, "true")
	for _, cmd := range []agent.Command{tty, other, large} {
		if _, err := q.ExecSync(deadline(t), cmd); !errdefs.IsNotImplemented(err) {
			t.Errorf("ExecSync(%+v) error = %v, want ErrNotImplemented", cmd, err)
		}
	}
	long := make(chan error, 1)
	go func() {
		_, err := q.ExecSync(deadline(t), command(nil, nil, nil, "sleep", "1"))
		long <- err
	}()
	if code, err := q.ExecSync(deadline(t), command(nil, nil, nil, "true")); code != 0 || err != nil || len(long) > 0 {
		t.Errorf("ExecSync while another program runs = %d, %v; want 0, nil", code, err)
	}
	if err := <-long; err != nil {
		t.Errorf("ExecSync of the other program: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := q.ExecSync(ctx, command(nil, nil, nil, "sleep", "1000")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("ExecSync after the deadline: error = %v, want DeadlineExceeded", err)
	}
	if err := q.Ping(deadline(t)); err != nil {
		t.Errorf("Ping afterwards: %v", err)
	}
}

// TestQGAAbsent: ExecSync and Ping notice soon that no agent answers.
func TestQGAAbsent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "qga.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	q := agent.OpenQGA(path)
	begin := time.Now()
	if _, err := q.ExecSync(deadline(t), command(nil, nil, nil, "true")); !errdefs.IsUnavailable(err) || time.Since(begin) > 30*time.Second {
		t.Errorf("ExecSync error = %v after %v, want ErrUnavailable within 30s", err, time.Since(begin))
	}
	if err := agent.OpenQGA(filepath.Join(t.TempDir(), "none")).Ping(deadline(t)); !errdefs.IsUnavailable(err) {
		t.Errorf("Ping without a socket: error = %v, want ErrUnavailable", err)
	}
}
