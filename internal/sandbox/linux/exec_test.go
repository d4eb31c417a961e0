package linux

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

func TestExec(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container(forever).start()
		var out, errOut bytes.Buffer
		code, err := r.Exec(t.Context(), p.Pod, c.Container, sandbox.ExecRequest{
			Cmd: []string{"/bin/sh", "-c", "cat; echo err >&2; exit 5"}, Stdin: strings.NewReader("in"), Stdout: &out, Stderr: &errOut,
		})
		if err != nil || code != 5 || out.String() != "in" || errOut.String() != "err\n" {
			t.Errorf("Exec: got code %d, error %v, stdout %q, stderr %q; want code 5, %q and %q", code, err, &out, &errOut, "in", "err\n")
		}
		if _, err = r.Exec(t.Context(), p.Pod, c.Container, sandbox.ExecRequest{Cmd: []string{"/nowhere"}}); !errdefs.IsInvalidArgument(err) ||
			!strings.HasPrefix(err.Error(), "failed to exec") {
			t.Errorf("Exec of a missing program: got error %v, want ErrInvalidArgument that begins with \"failed to exec\"", err)
		}
		if code, err = r.Exec(t.Context(), p.Pod, c.Container, sandbox.ExecRequest{Cmd: []string{"/bin/sh", "-c", "kill -9 $$"}}); err != nil ||
			code != 137 {
			t.Errorf("Exec of a killed program: got code %d, error %v; want code 137", code, err)
		}
		c.stop(0)
		if _, err = r.Exec(t.Context(), p.Pod, c.Container, sandbox.ExecRequest{Cmd: []string{"/bin/true"}}); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("Exec in a stopped container: got error %v, want ErrFailedPrecondition", err)
		}
	})
}

// TestExecStarts: with a limit, a program that cannot be started before its caller gives up is never started. A program that
// has started does not delay others.
func TestExecStarts(t *testing.T) {
	r := newRig(t, "crun")
	r.sessions.starts = make(chan struct{}, 1)
	p := r.pod()
	c := p.container(forever).start()
	ctx, end := context.WithCancel(t.Context())
	up, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := r.Exec(ctx, p.Pod, c.Container, sandbox.ExecRequest{
			Cmd:    []string{"/bin/sh", "-c", "echo up; exec sleep 3333"},
			Stdout: writerFunc(func(b []byte) (int, error) { close(up); return len(b), nil }),
		})
		ended <- err
	}()
	<-up
	try := func(limit time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		_, err := r.Exec(ctx, p.Pod, c.Container, sandbox.ExecRequest{Cmd: []string{"/bin/sh", "-c", "echo started >>/started"}})
		return err
	}
	if err := try(time.Minute); err != nil {
		t.Errorf("Exec beside a program that runs: %v", err)
	}
	r.sessions.starts <- struct{}{} // as a program that is being started
	if err := try(50 * time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Exec beside a program that is being started: got error %v, want that its time is over", err)
	}
	<-r.sessions.starts
	if err := try(time.Minute); err != nil {
		t.Errorf("Exec after another start: %v", err)
	}
	var out bytes.Buffer
	if _, err := r.Exec(t.Context(), p.Pod, c.Container,
		sandbox.ExecRequest{Cmd: []string{"/bin/cat", "/started"}, Stdout: &out}); err != nil || out.String() != "started\nstarted\n" {
		t.Errorf("programs that were started: got %q, error %v; want two", &out, err)
	}
	end()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the first program: got error %v, want that it was canceled", err)
	}
	if n := len(r.sessions.starts); n != 0 {
		t.Errorf("programs that are being started: got %d, want none", n)
	}
}

// TestC4ExecDrain: a child that holds the output does not block the caller, and no program outlives its context.
func TestC4ExecDrain(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container(forever).start()
		var out safeBuffer
		began := time.Now()
		code, err := r.Exec(t.Context(), p.Pod, c.Container, sandbox.ExecRequest{
			Cmd: []string{"/bin/sh", "-c", "setsid sleep 3333 & echo done"}, Stdout: &out, Stderr: &out,
		})
		if took := time.Since(began); err != nil || code != 0 || took > 4*time.Second {
			t.Errorf("exec: got exit code %d, error %v after %v; want code 0 without waiting for the child", code, err, took)
		}
		if got := out.String(); got != "done\n" {
			t.Errorf("output: got %q, want %q", got, "done\n")
		}
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		_, err = r.Exec(ctx, p.Pod, c.Container, sandbox.ExecRequest{Cmd: []string{"/bin/sh", "-c", "trap '' TERM; sleep 2222"}, Stdout: &out})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Exec beyond its deadline: got error %v, want DeadlineExceeded", err)
		}
		if got := c.exec("ps"); strings.Contains(got, "2222") {
			t.Errorf("the program still runs: %s", got)
		}
	})
}

func TestExecTerminal(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container(forever).start()
		stdin, feed := io.Pipe()
		sizes := make(chan sandbox.TermSize, 1)
		sizes <- sandbox.TermSize{Width: 132, Height: 43}
		var out safeBuffer
		result := make(chan error, 1)
		go func() {
			code, err := r.Exec(t.Context(), p.Pod, c.Container, sandbox.ExecRequest{
				Cmd: []string{"/bin/sh", "-c", "test -t 0 && echo terminal; read x; stty size; exit 4"}, TTY: true,
				Stdin: stdin, Stdout: &out, Resize: sizes,
			})
			if err == nil && code != 4 {
				err = errors.New("exit code")
			}
			result <- err
		}()
		out.waitFor(t, "terminal")
		_, _ = io.WriteString(feed, "go\n")
		if err := <-result; err != nil {
			t.Error(err)
		}
		if got := out.String(); !strings.Contains(got, "43 132") {
			t.Errorf("terminal size: got %q, want 43 132", got)
		}
		_ = feed.Close()
	})
}

// safeBuffer is a buffer for concurrent use.
type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safeBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func (s *safeBuffer) waitFor(t *testing.T, text string) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !strings.Contains(s.String(), text); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("output: got %q, want it to contain %q", s.String(), text)
		}
	}
}

func TestAttach(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container("read x; echo out-$x; echo err-$x >&2; cat; exit 6", func(c *runtimeapi.ContainerConfig) {
			c.Stdin, c.StdinOnce = true, true
		}).start()
		stdin, feed := io.Pipe()
		var out, errOut safeBuffer
		result := make(chan error, 1)
		go func() {
			result <- r.Attach(t.Context(), p.Pod, c.Container, sandbox.AttachRequest{Stdin: stdin, Stdout: &out, Stderr: &errOut})
		}()
		_, _ = io.WriteString(feed, "hello\n")
		out.waitFor(t, "out-hello")
		errOut.waitFor(t, "err-hello")
		_, _ = io.WriteString(feed, "more\n")
		_ = feed.Close() // stdin_once: the program sees the end of input
		if err := <-result; err != nil {
			t.Error(err)
		}
		if s := c.waitExit(); s.ExitCode != 6 {
			t.Errorf("status: got %+v, want exit code 6", s)
		}
		if got := out.String(); got != "out-hello\nmore\n" {
			t.Errorf("output: got %q, want %q", got, "out-hello\nmore\n")
		}
	})
}

// TestAttachTwice: without stdin_once a client attaches and disconnects, and the same program serves the next one.
func TestAttachTwice(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container("while read x; do echo got-$x; done; exit 6", func(c *runtimeapi.ContainerConfig) { c.Stdin = true }).start()
		for _, word := range []string{"one", "two"} {
			ctx, cancel := context.WithCancel(t.Context())
			var out safeBuffer
			result := make(chan error, 1)
			go func() {
				result <- r.Attach(ctx, p.Pod, c.Container, sandbox.AttachRequest{Stdin: strings.NewReader(word + "\n"), Stdout: &out})
			}()
			out.waitFor(t, "got-"+word)
			cancel()
			if err := <-result; !errors.Is(err, context.Canceled) {
				t.Errorf("Attach after its context ended: got error %v, want Canceled", err)
			}
		}
		if s := c.status(); s.State != sandbox.StateRunning {
			t.Errorf("status: got %+v, want a running container", s)
		}
	})
}

func TestAttachTerminal(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container("while read x; do stty size; done", func(c *runtimeapi.ContainerConfig) { c.Stdin, c.Tty = true, true }).start()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stdin, feed := io.Pipe()
		sizes := make(chan sandbox.TermSize)
		var out safeBuffer
		result := make(chan error, 1)
		go func() {
			result <- r.Attach(ctx, p.Pod, c.Container, sandbox.AttachRequest{Stdin: stdin, Stdout: &out, TTY: true, Resize: sizes})
		}()
		sizes <- sandbox.TermSize{Width: 101, Height: 33}
		for deadline := time.Now().Add(10 * time.Second); !strings.Contains(out.String(), "33 101") && time.Now().Before(deadline); {
			_, _ = io.WriteString(feed, "x\n") // until the size arrives
			time.Sleep(10 * time.Millisecond)
		}
		out.waitFor(t, "33 101")
		cancel()
		<-result
		_ = feed.Close()
	})
}

// TestC6NoDescriptorLeaks: neither the container nor its monitor has any of our descriptors.
func TestC6NoDescriptorLeaks(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container(forever).start()
		c.waitLog("up") // before, runc's own init may still be running
		h, _ := r.ledger.Find(p.ID, c.ID)
		s, _ := h.Snapshot()
		for _, fd := range descriptors(t, s.Init.Pid) {
			if !strings.HasPrefix(fd, "pipe:") && fd != "/dev/null" && !strings.HasPrefix(fd, "/bin/") {
				t.Errorf("the container has the descriptor %s", fd)
			}
		}
		for _, fd := range descriptors(t, s.Conmon.Pid) {
			known := strings.HasPrefix(fd, "pipe:") || strings.HasPrefix(fd, "socket:") || strings.HasPrefix(fd, "anon_inode:[") ||
				strings.HasPrefix(fd, r.bundleOf(h)) || fd == "/dev/null" || fd == c.logFile() || strings.HasPrefix(fd, "/sys/fs/cgroup/")
			if !known || strings.HasPrefix(fd, "anon_inode:[eventpoll]") || strings.Contains(fd, "pidfd") {
				t.Errorf("conmon has the descriptor %s", fd)
			}
		}
		var st unix.Stat_t
		if err := unix.Stat(r.bundleOf(h), &st); err != nil || st.Mode&0o77 != 0 {
			t.Errorf("mode of the bundle: got %o, error %v; want no access for group and others", st.Mode, err)
		}
	})
}

func descriptors(t *testing.T, pid int) (names []string) {
	t.Helper()
	dir := "/proc/" + strconv.Itoa(pid) + "/fd/"
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if name, err := os.Readlink(dir + e.Name()); err == nil {
			names = append(names, name)
		}
	}
	return names
}

// TestHome: HOME is that of the image's user, and / for a user without an entry, in the container's program and in exec.
func TestHome(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		for uid, want := range map[int64]string{0: "/root", 4321: "/"} {
			c := p.container("echo home=$HOME; "+forever, func(c *runtimeapi.ContainerConfig) {
				c.Linux.SecurityContext.RunAsUser = &runtimeapi.Int64Value{Value: uid}
			}).start()
			c.waitLog("home=" + want + "\n")
			out := &safeBuffer{}
			_, err := r.Exec(t.Context(), p.Pod, c.Container, sandbox.ExecRequest{Cmd: []string{"/bin/sh", "-c", "echo home=$HOME"}, Stdout: out})
			if err != nil || out.String() != "home="+want+"\n" {
				t.Errorf("exec by %d: got %q, %v; want %s", uid, out.String(), err, want)
			}
			c.stop(0)
		}
	})
}
