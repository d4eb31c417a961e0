package agent_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
)

func command(stdin io.Reader, stdout, stderr io.Writer, args ...string) agent.Command {
	return agent.Command{ExecRequest: sandbox.ExecRequest{Cmd: args, Stdin: stdin, Stdout: stdout, Stderr: stderr}}
}

func TestExec(t *testing.T) {
	a, _ := connected(t)
	for _, test := range []struct {
		name     string
		args     []string
		stdin    string
		out, err string
		code     int32
	}{
		{"output and code", []string{"sh", "-c", "echo one; echo two >&2; exit 3"}, "", "one\n", "two\n", 3},
		{"stdin to its end", []string{"cat"}, "text\x00more\n", "text\x00more\n", "", 0},
		{"signal", []string{"sh", "-c", "kill -TERM $$"}, "", "", "", 143},
		{"no stdin wanted", []string{"sh", "-c", "exec <&-; echo done"}, "ignored", "done\n", "", 0},
		{"environment", []string{"sh", "-c", "echo $PATH; echo $A; pwd"}, "",
			"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nb=c\n/tmp\n", "", 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			var out, errOut bytes.Buffer
			cmd := command(strings.NewReader(test.stdin), &out, &errOut, test.args...)
			cmd.Env, cmd.Dir = []string{"A=b=c"}, "/tmp"
			code, err := a.Exec(deadline(t), cmd)
			if err != nil || code != test.code || out.String() != test.out || errOut.String() != test.err {
				t.Errorf("Exec = %d, %v with stdout %q, stderr %q; want %d with %q, %q", code, err, out.String(), errOut.String(), test.code, test.out,
					test.err)
			}
		})
	}
}

// TestExecFailures: a command that cannot be run is ErrInvalidArgument.
func TestExecFailures(t *testing.T) {
	a, _ := connected(t)
	dir := t.TempDir()
	text := filepath.Join(dir, "text")
	os.WriteFile(text, []byte("hello"), 0o644)
	for _, cmd := range []agent.Command{
		command(nil, nil, nil),
		command(nil, nil, nil, "tripod-no-such-program"),
		command(nil, nil, nil, "/no/such/program"),
		command(nil, nil, nil, text),
		command(nil, nil, nil, dir),
		{ExecRequest: sandbox.ExecRequest{Cmd: []string{"true"}}, Dir: "/no/such/directory"},
		{ExecRequest: sandbox.ExecRequest{Cmd: []string{"true"}}, User: "tripod-nobody"},
		{ExecRequest: sandbox.ExecRequest{Cmd: []string{"true"}}, User: "root:tripod-nobody"},
		command(nil, nil, nil, "echo", strings.Repeat("x", 300<<10)),
	} {
		if _, err := a.Exec(deadline(t), cmd); !errdefs.IsInvalidArgument(err) {
			t.Errorf("Exec(%.40q) as %q in %q: error = %v, want ErrInvalidArgument", cmd.Cmd, cmd.User, cmd.Dir, err)
		} else {
			t.Log(err)
		}
	}
}

func TestExecAsUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("needs root: run it by hack/testns.sh")
	}
	a, _ := connected(t)
	for user, want := range map[string]string{"": "0 0\n", "nobody": "65534 65534\n", "1234:5678": "1234 5678\n", "nobody:0": "65534 0\n"} {
		var out bytes.Buffer
		cmd := command(nil, &out, &out, "sh", "-c", "echo $(id -u) $(id -g)")
		cmd.User, cmd.Dir = user, "/"
		if code, err := a.Exec(deadline(t), cmd); err != nil || code != 0 || out.String() != want {
			t.Errorf("Exec as %q = %d, %v with output %q; want %q", user, code, err, out.String(), want)
		}
	}
}

// TestTerminalOfUser: a terminal belongs to its user, who can open it by its name.
func TestTerminalOfUser(t *testing.T) {
	a, _ := connected(t)
	var out bytes.Buffer
	cmd := command(nil, &out, nil, "sh", "-c", "echo mine >$(tty)")
	cmd.User, cmd.Dir, cmd.TTY, cmd.Stdin = "nobody", "/", true, strings.NewReader("")
	if code, err := a.Exec(deadline(t), cmd); err != nil || code != 0 || out.String() != "mine\r\n" {
		t.Errorf("Exec = %d, %v with output %q; want \"mine\"", code, err, out.String())
	}
}

// TestLargeStdin: 10 MB of stdin come back unchanged.
func TestLargeStdin(t *testing.T) {
	a, _ := connected(t)
	data := make([]byte, 10_000_000)
	source := rand.NewChaCha8([32]byte{1})
	source.Read(data)
	hash := sha256.New()
	code, err := a.Exec(deadline(t), command(bytes.NewReader(data), hash, nil, "cat"))
	if want := sha256.Sum256(data); err != nil || code != 0 || !bytes.Equal(hash.Sum(nil), want[:]) {
		t.Errorf("Exec = %d, %v, or the output differs from stdin", code, err)
	}
}

// TestSlowReaderAlone: a client that does not read blocks only its own program, and gets all output when it reads
// again.
func TestSlowReaderAlone(t *testing.T) {
	a, _ := connected(t)
	until := make(chan struct{})
	var slow sync.WaitGroup
	var total int
	slow.Go(func() {
		counted := writerFunc(func(p []byte) (int, error) { <-until; total += len(p); return len(p), nil })
		blocked := writerFunc(func(p []byte) (int, error) { <-until; return len(p), nil })
		if code, err := a.Exec(deadline(t), command(nil, counted, blocked, "sh", "-c", "yes | head -c 3000000; echo x >&2")); code != 0 ||
			err != nil {
			t.Errorf("Exec with a slow reader = %d, %v; want 0, nil", code, err)
		}
	})
	for i := range 20 {
		var out bytes.Buffer
		if _, err := a.Exec(deadline(t), command(nil, &out, nil, "echo", strconv.Itoa(i))); err != nil || out.String() != fmt.Sprintln(i) {
			t.Fatalf("Exec beside a slow reader: output %q, error %v; want %q", out.String(), err, fmt.Sprintln(i))
		}
	}
	close(until)
	slow.Wait()
	if total != 3000000 {
		t.Errorf("the slow reader got %d bytes, want 3000000", total)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// TestCancelKills: cancelling kills the program and its children, even in other process groups.
func TestCancelKills(t *testing.T) {
	a, _ := connected(t)
	for _, tty := range []bool{false, true} {
		ctx, cancel := context.WithCancel(deadline(t))
		lines := make(chan string, 10)
		cmd := command(nil, lineWriter(lines), nil, "bash", "-c", "set -m; sleep 1000 & echo $! $$; wait")
		cmd.TTY = tty
		failed := make(chan error, 1)
		go func() {
			_, err := a.Exec(ctx, cmd)
			failed <- err
		}()
		var pids [2]int
		select {
		case line := <-lines:
			if _, err := fmt.Sscan(line, &pids[0], &pids[1]); err != nil {
				t.Fatalf("the program printed %q, want two PIDs: %v", line, err)
			}
		case err := <-failed:
			t.Fatal(err)
		}
		cancel()
		if err := <-failed; !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled Exec (terminal: %t): error = %v, want context.Canceled", tty, err)
		}
		awaitGone(t, pids[:]...)
	}
}

// lineWriter returns a writer that sends each line to lines.
func lineWriter(lines chan<- string) io.Writer {
	var rest string
	return writerFunc(func(p []byte) (int, error) {
		rest += string(p)
		for {
			line, more, ok := strings.Cut(rest, "\n")
			if !ok {
				return len(p), nil
			}
			lines <- strings.TrimSpace(line)
			rest = more
		}
	})
}

func awaitGone(t *testing.T, pids ...int) {
	t.Helper()
	for _, pid := range pids {
		for end := time.Now().Add(patience); unix.Kill(pid, 0) == nil && !zombie(pid); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("process %d still runs", pid)
			}
		}
	}
}

func zombie(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err != nil || strings.Contains(string(stat), ") Z ")
}

// TestChildHoldsOutput: a child that holds the output delays the end of Exec only by the drain time, even if it keeps
// writing.
func TestChildHoldsOutput(t *testing.T) {
	a, _ := connected(t)
	for _, child := range []string{"sleep 1000", "yes"} {
		var out bytes.Buffer
		begin := time.Now()
		code, err := a.Exec(deadline(t), command(nil, &out, nil, "sh", "-c", child+" & echo $! >&2; exit 7"))
		if err != nil || code != 7 || time.Since(begin) > 20*time.Second {
			t.Errorf("Exec with child %q = %d, %v after %v; want 7 within 20s", child, code, err, time.Since(begin))
		}
	}
	var out bytes.Buffer
	a.Exec(deadline(t), command(nil, &out, nil, "sh", "-c", "pkill -x -f 'sleep 1000'; pkill -x yes"))
}

// TestTerminal: a terminal can be resized, and carries input and output.
func TestTerminal(t *testing.T) {
	a, _ := connected(t)
	in, feed := io.Pipe()
	lines := make(chan string, 100)
	sizes := make(chan sandbox.TermSize)
	cmd := command(in, lineWriter(lines), nil, "bash", "-c",
		`trap 'echo size $(stty size)' WINCH; tty; echo up; while read -r -t 0.1 l || [ $? -gt 128 ]; do [ "$l" = end ] && exit 5; l=; done`)
	cmd.TTY, cmd.Resize = true, sizes
	type result struct {
		code int32
		err  error
	}
	ended := make(chan result, 1)
	go func() {
		code, err := a.Exec(deadline(t), cmd)
		ended <- result{code, err}
	}()
	expect := func(want string) {
		t.Helper()
		for {
			select {
			case line := <-lines:
				if strings.HasPrefix(line, want) {
					return
				}
			case r := <-ended:
				t.Fatalf("Exec = %d, %v before the output %q", r.code, r.err, want)
			}
		}
	}
	expect("/dev/pts/")
	expect("up")
	sizes <- sandbox.TermSize{Width: 132, Height: 43}
	expect("size 43 132")
	io.WriteString(feed, "end\n")
	if r := <-ended; r.code != 5 || r.err != nil {
		t.Errorf("Exec = %d, %v; want 5, nil", r.code, r.err)
	}
}

// TestOpenedTogether: operations that begin at the same time reach the guest in the order of their stream numbers.
func TestOpenedTogether(t *testing.T) {
	a, _ := connected(t)
	for range 100 {
		var group sync.WaitGroup
		for range 50 {
			group.Go(func() {
				if _, err := a.Exec(deadline(t), command(nil, nil, nil, "/none")); !errdefs.IsInvalidArgument(err) {
					t.Errorf("Exec of a missing program: error = %v, want ErrInvalidArgument", err)
				}
			})
		}
		group.Wait()
	}
}

// TestManyAtOnce: operations beyond the protocol's maximum are refused, and the session stays usable.
func TestManyAtOnce(t *testing.T) {
	a, _ := connected(t)
	var group sync.WaitGroup
	ctx, cancel := context.WithCancel(deadline(t))
	refused := make(chan error, 200)
	for range 140 {
		group.Go(func() {
			if _, err := a.Exec(ctx, command(nil, nil, nil, "sleep", "1000")); errdefs.IsResourceExhausted(err) {
				refused <- err
			}
		})
	}
	<-refused
	cancel()
	group.Wait()
	if code, err := a.Exec(deadline(t), command(nil, nil, nil, "true")); code != 0 || err != nil {
		t.Errorf("Exec afterwards = %d, %v; want 0, nil", code, err)
	}
}
