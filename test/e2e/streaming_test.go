package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// buffer is a buffer for concurrent use.
type buffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func (b *buffer) wait(t *testing.T, text string) {
	t.Helper()
	harness.Eventually(t, waitLimit, func() error {
		if got := b.String(); !strings.Contains(got, text) {
			return fmt.Errorf("output: got %q, want %q in it", got, text)
		}
		return nil
	})
}

// session is a stream in the background.
type session struct {
	t      *testing.T
	stdin  *io.PipeWriter
	stdout buffer
	sizes  sizes
	end    context.CancelFunc
	done   chan struct{}
	code   int
	err    error
}

// sizes delivers the sizes of the client's terminal.
type sizes chan *remotecommand.TerminalSize

func (s sizes) Next() *remotecommand.TerminalSize { return <-s }

// startSession starts a stream with stdin and stdout. Without tty, stderr is part of stdout.
func startSession(t *testing.T, p harness.Protocol, rawURL string, tty bool) *session {
	t.Helper()
	ctx, end := context.WithTimeout(context.Background(), time.Minute)
	r, w := io.Pipe()
	s := &session{t: t, stdin: w, sizes: make(sizes, 4), end: end, done: make(chan struct{})}
	o := remotecommand.StreamOptions{Stdin: r, Stdout: &s.stdout, Tty: tty, TerminalSizeQueue: s.sizes}
	if !tty {
		o.Stderr = &s.stdout
	}
	go func() {
		defer close(s.done)
		s.code, s.err = harness.Stream(ctx, p, rawURL, o)
	}()
	t.Cleanup(func() {
		end()
		w.Close()
		close(s.sizes)
		<-s.done
	})
	return s
}

func (s *session) send(text string) {
	s.t.Helper()
	if _, err := io.WriteString(s.stdin, text); err != nil {
		s.t.Fatal(err)
	}
}

// wait waits for the end of the session, which must be the program's exit with this code.
func (s *session) wait(code int) {
	s.t.Helper()
	select {
	case <-s.done:
	case <-time.After(waitLimit):
		s.t.Fatalf("the session did not end within %v; output %q", waitLimit, s.stdout.String())
	}
	if s.err != nil || s.code != code {
		s.t.Errorf("end of the session: got code %d, error %v; want code %d", s.code, s.err, code)
	}
}

// execURL returns the URL of an exec with all streams.
func execURL(t *testing.T, d *harness.Daemon, c *harness.Container, tty bool, argv ...string) string {
	t.Helper()
	resp, err := d.Runtime().Exec(context.Background(),
		&runtimeapi.ExecRequest{ContainerId: c.ID, Cmd: argv, Tty: tty, Stdin: true, Stdout: true, Stderr: !tty})
	if err != nil {
		t.Fatal(err)
	}
	return resp.Url
}

func TestExecStream(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	for _, p := range harness.Protocols {
		t.Run(string(p), func(t *testing.T) {
			t.Run("runtime should support exec with tty=false and stdin=false [Conformance]", func(t *testing.T) {
				r := sleeper(t, d).Exec(p, nil, false, "sh", "-c", "echo hello; echo world >&2; exit 9")
				if r != (harness.ExecResult{Stdout: "hello\n", Stderr: "world\n", Code: 9}) {
					t.Errorf("exec: got %+v, want hello, world and code 9", r)
				}
			})
			t.Run("runtime should support exec with tty=true and stdin=true [Conformance]", func(t *testing.T) {
				s := startSession(t, p, execURL(t, d, sleeper(t, d), true, "sh"), true)
				s.send("test -t 0 && test -t 1 && test -t 2 && echo a ter''minal\n")
				s.stdout.wait(t, "a terminal\r\n")
				s.send("exit 5\n")
				s.wait(5)
			})
			t.Run("the terminal has the client's size, and follows it", func(t *testing.T) {
				s := startSession(t, p, execURL(t, d, sleeper(t, d), true, "sh", "-c", "while :; do stty size; usleep 20000; done"), true)
				for _, size := range []remotecommand.TerminalSize{{Width: 132, Height: 50}, {Width: 91, Height: 17}} {
					s.sizes <- &size
					s.stdout.wait(t, fmt.Sprintf("%d %d\r\n", size.Height, size.Width))
				}
				s.send("\x03")
				s.wait(130)
			})
			t.Run("much output arrives whole", func(t *testing.T) {
				r := sleeper(t, d).Exec(p, nil, false, "sh", "-c", "head -c 8000000 /dev/zero | tr '\\0' x; head -c 2000000 /dev/zero | tr '\\0' y >&2")
				if strings.Count(r.Stdout, "x") != 8000000 || strings.Count(r.Stderr, "y") != 2000000 || r.Code != 0 {
					t.Errorf("exec: got %d bytes of stdout, %d of stderr, code %d; want 8000000, 2000000 and 0", len(r.Stdout), len(r.Stderr), r.Code)
				}
			})
			t.Run("a program that is not there", func(t *testing.T) {
				u := execURL(t, d, sleeper(t, d), false, "/no/such/program")
				code, err := harness.Stream(context.Background(), p, u,
					remotecommand.StreamOptions{Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: io.Discard})
				if err == nil && code == 0 || err != nil && !strings.Contains(err.Error(), "/no/such/program") {
					t.Errorf("exec of a missing program: got code %d, error %v; want a failure that names the program", code, err)
				}
			})
		})
	}
	t.Run("SPDY: the end of stdin reaches the program", func(t *testing.T) {
		r := sleeper(t, d).Exec(harness.SPDY, strings.NewReader(strings.Repeat("z", 1<<20)), false, "sh", "-c", "wc -c; echo after")
		if r.Stdout != "1048576\nafter\n" || r.Code != 0 {
			t.Errorf("exec of wc: got %+v, want 1048576 and after", r)
		}
	})
	t.Run("WebSocket version 5: the end of stdin reaches the program", func(t *testing.T) {
		e, err := remotecommand.NewWebSocketExecutor(&rest.Config{}, http.MethodGet,
			execURL(t, d, sleeper(t, d), false, "sh", "-c", "wc -c; echo after"))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
		defer cancel()
		var out buffer
		err = e.StreamWithContext(ctx,
			remotecommand.StreamOptions{Stdin: strings.NewReader(strings.Repeat("z", 1<<20)), Stdout: &out, Stderr: &out})
		if err != nil || out.String() != "1048576\nafter\n" {
			t.Errorf("exec of wc: got %q, error %v; want 1048576 and after", out.String(), err)
		}
	})
	t.Run("a program whose client goes away ends", func(t *testing.T) {
		c := sleeper(t, d)
		s := startSession(t, harness.SPDY, execURL(t, d, c, false, "sh", "-c", "echo up; exec sleep 54321"), false)
		s.stdout.wait(t, "up")
		s.end()
		harness.Eventually(t, waitLimit, func() error {
			if out := c.Must("ps"); strings.Contains(out, "54321") {
				return errors.New(out)
			}
			return nil
		})
	})
	t.Run("a URL is good for one session", func(t *testing.T) {
		u := execURL(t, d, sleeper(t, d), false, "true")
		o := remotecommand.StreamOptions{Stdin: strings.NewReader(""), Stdout: io.Discard, Stderr: io.Discard}
		if code, err := harness.Stream(context.Background(), harness.SPDY, u, o); code != 0 || err != nil {
			t.Errorf("first use of the URL: got code %d, error %v; want success", code, err)
		}
		if _, err := harness.Stream(context.Background(), harness.SPDY, u, o); err == nil {
			t.Error("second use of the URL succeeded, want an error")
		}
		if resp, err := http.Get(u[:strings.LastIndex(u, "/")+1] + "guessed"); err != nil || resp.StatusCode != http.StatusNotFound {
			t.Errorf("request with a guessed token: got %v, error %v; want 404", resp, err)
		}
	})
}

func TestExecSync(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
	sync := func(timeout int64, argv ...string) (*runtimeapi.ExecSyncResponse, error) {
		return d.CRI().ExecSync(context.Background(), &runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: argv, Timeout: timeout})
	}
	t.Run("exit codes and both outputs", func(t *testing.T) {
		for _, code := range []int32{0, 1, 126, 255} {
			r, err := sync(0, "sh", "-c", fmt.Sprintf("echo out; echo err >&2; exit %d", code))
			if err != nil || r.ExitCode != code || string(r.Stdout) != "out\n" || string(r.Stderr) != "err\n" {
				t.Errorf("ExecSync: got %v, error %v; want code %d and both outputs", r, err, code)
			}
		}
		if r, err := sync(0, "sh", "-c", "kill -9 $$"); err != nil || r.ExitCode != 137 {
			t.Errorf("ExecSync of a killed program: got %v, error %v; want code 137", r, err)
		}
	})
	t.Run("the environment and the directory are the container's", func(t *testing.T) {
		config := harness.ContainerConfig("env", harness.Busybox, harness.Sleep())
		config.Envs, config.WorkingDir = []*runtimeapi.KeyValue{{Key: "A", Value: []byte("b")}}, "/etc"
		if got := c.Pod.Run(config).Must("sh", "-c", "echo $A $PWD"); got != "b /etc\n" {
			t.Errorf("environment and directory: got %q, want b /etc", got)
		}
	})
	t.Run("what is wrong with the request", func(t *testing.T) {
		_, err := sync(0)
		wantCode(t, err, codes.InvalidArgument)
		_, err = sync(-1, "true")
		wantCode(t, err, codes.InvalidArgument)
		_, err = sync(0, "/no/such/program")
		wantCode(t, err, codes.InvalidArgument)
		_, err = d.CRI().ExecSync(context.Background(), &runtimeapi.ExecSyncRequest{ContainerId: strings.Repeat("1f", 32), Cmd: []string{"true"}})
		wantCode(t, err, codes.NotFound)
	})
	t.Run("a timeout ends the program and its children", func(t *testing.T) {
		begin := time.Now()
		_, err := sync(1, "sh", "-c", "sleep 43210 & sleep 43211")
		wantCode(t, err, codes.DeadlineExceeded)
		if took := time.Since(begin); took > 10*time.Second {
			t.Errorf("ExecSync beyond its timeout: took %v, want at most 10s", took)
		}
		if out := c.Must("ps", "-o", "pid,ppid,pgid,args"); strings.Contains(out, "sleep 4321") {
			t.Errorf("ps after the timeout: want no sleep 4321 in\n%s", out)
		}
	})
	t.Run("C4 a flood of output is capped", func(t *testing.T) {
		r, err := sync(60, "sh", "-c", "head -c 20000000 /dev/zero; echo end >&2; exit 3")
		if err != nil {
			t.Fatal(err)
		}
		if n := len(r.Stdout) + len(r.Stderr); n > 16<<20 || n < 15<<20 || r.ExitCode != 3 {
			t.Errorf("ExecSync: got %d bytes, code %d; want 15 to 16 MiB and code 3", n, r.ExitCode)
		}
		if !strings.Contains(string(r.Stderr), "dropped") {
			t.Errorf("stderr: got %.200q, want a note that output was dropped", r.Stderr)
		}
	})
	t.Run("C4 a child that holds the output", func(t *testing.T) {
		begin := time.Now()
		r, err := sync(0, "sh", "-c", "sleep 3600 & echo $!; exit 4")
		if err != nil || r.ExitCode != 4 {
			t.Fatalf("ExecSync: got %v, error %v; want the exit code 4", r, err)
		}
		if took := time.Since(begin); took > 10*time.Second {
			t.Errorf("ExecSync with a child that holds the output: took %v, want at most 10s", took)
		}
		c.Must("kill", strings.TrimSpace(string(r.Stdout)))
	})
}

func TestAttach(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	const echo = `echo ready; while read -r line; do echo "got $line"; done; echo the end; exit 8`
	start := func(t *testing.T, tty, once bool) *harness.Container {
		config := harness.ContainerConfig("c", harness.Busybox, harness.Shell(echo))
		config.Stdin, config.StdinOnce, config.Tty = true, once, tty
		c := startPod(t, d).Run(config)
		c.WaitLog("ready")
		return c
	}
	for _, p := range harness.Protocols {
		t.Run(string(p), func(t *testing.T) {
			t.Run("runtime should support attach [Conformance]", func(t *testing.T) {
				c := start(t, false, false)
				s := startSession(t, p, c.AttachURL(true, false), false)
				s.send("hello\n")
				s.stdout.wait(t, "got hello\n")
				c.WaitLog("got hello")
			})
			t.Run("a terminal", func(t *testing.T) {
				c := start(t, true, false)
				s := startSession(t, p, c.AttachURL(true, true), true)
				s.send("hello\n")
				s.stdout.wait(t, "got hello\r\n")
			})
			t.Run("a client without a terminal watches one", func(t *testing.T) {
				c := start(t, true, false)
				watcher, typist := startSession(t, p, c.AttachURL(true, false), false), startSession(t, p, c.AttachURL(true, true), true)
				harness.Eventually(t, waitLimit, func() error { // until the watcher has attached
					typist.send("hello\n")
					if !strings.Contains(watcher.stdout.String(), "got hello\r\n") {
						return fmt.Errorf("output of the watcher: got %q, want \"got hello\"", watcher.stdout.String())
					}
					return nil
				})
			})
			t.Run("the end of the container is the end of the session", func(t *testing.T) {
				c := start(t, true, false)
				s := startSession(t, p, c.AttachURL(true, true), true)
				s.send("\x04")
				s.stdout.wait(t, "the end")
				s.wait(0)
				c.WaitExit(8)
			})
		})
	}
	for _, p := range harness.HalfClosing {
		t.Run("the end of the client's input is the end of the session/"+string(p), func(t *testing.T) {
			for _, o := range []struct{ tty, once bool }{{true, false}, {true, true}, {false, false}} {
				c := start(t, o.tty, o.once)
				s := startSession(t, p, c.AttachURL(true, o.tty), o.tty)
				s.send("hello\n")
				s.stdout.wait(t, "got hello")
				s.stdin.Close()
				s.wait(0)
				if s := c.Status(); s.State != running {
					t.Errorf("%+v: state of the container: got %v, want running", o, s.State)
				}
			}
		})
	}
	t.Run("tripod attach -it on a terminal: Ctrl-P Ctrl-Q leaves", func(t *testing.T) {
		c := start(t, true, false)
		attach := tripod(t, d, "attach", "-it", c.ID)
		command, keys, screen := onTerminal(t, attach)
		harness.Eventually(t, waitLimit, func() error { // input before the terminal is raw is echoed twice
			if _, err := io.WriteString(keys, "hello\r"); err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(screen.String(), "got hello\r\n") {
				return fmt.Errorf("screen: got %q, want \"got hello\"", screen.String())
			}
			return nil
		})
		if _, err := io.WriteString(keys, "\x10\x11"); err != nil {
			t.Fatal(err)
		}
		waitSuccess(t, command, screen)
		if s := c.Status(); s.State != running {
			t.Errorf("state of the container: got %v, want running", s.State)
		}
	})
	t.Run("stdin_once: the first client's end is the program's end of input", func(t *testing.T) {
		c := start(t, false, true)
		s := startSession(t, harness.SPDY, c.AttachURL(true, false), false)
		s.send("last words\n")
		s.stdout.wait(t, "got last words\n")
		s.stdin.Close()
		c.WaitExit(8)
	})
	t.Run("without stdin_once input stays open for the next client", func(t *testing.T) {
		c := start(t, false, false)
		for n := range 3 {
			s := startSession(t, harness.SPDY, c.AttachURL(true, false), false)
			s.send(fmt.Sprintf("client %d\n", n))
			s.stdout.wait(t, fmt.Sprintf("got client %d\n", n))
			s.end()
			<-s.done
		}
		if s := c.Status(); s.State != running {
			t.Errorf("state of the container: got %v, want running", s.State)
		}
	})
	t.Run("two clients at a time", func(t *testing.T) {
		c := start(t, false, false)
		one, two := startSession(t, harness.SPDY, c.AttachURL(true, false), false),
			startSession(t, harness.WebSocket, c.AttachURL(true, false), false)
		// A client has attached once it receives the echo of its input.
		one.send("one\n")
		one.stdout.wait(t, "got one")
		two.send("two\n")
		one.stdout.wait(t, "got two")
		two.stdout.wait(t, "got two")
	})
	t.Run("a container that has ended", func(t *testing.T) {
		c := startPod(t, d).Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell("true")))
		c.WaitExit(0)
		_, err := d.CRI().Attach(context.Background(), &runtimeapi.AttachRequest{ContainerId: c.ID, Stdout: true})
		wantCode(t, err, codes.FailedPrecondition)
	})
}

func TestPortForward(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Nginx)
	d.Pull(t, harness.Busybox)
	const welcome = "Welcome to nginx!"
	t.Run("runtime should support portforward [Conformance]", func(t *testing.T) {
		p := startPod(t, d)
		p.Run(harness.ContainerConfig("web", harness.Nginx))
		get(t, "http://"+p.IP()) // because a forwarder, like kubectl's, ends if the first connection is refused
		addr := p.Forward(t, 80)
		for range 5 {
			if got := get(t, "http://"+addr); !strings.Contains(got, welcome) {
				t.Errorf("page: got %q, want %q in it", got, welcome)
			}
		}
	})
	t.Run("runtime should support portforward in host network", func(t *testing.T) {
		p := startPod(t, d, harness.HostNetwork())
		p.Run(harness.ContainerConfig("web", harness.HostNginx, harness.Security(func(s *security) {
			s.NamespaceOptions.Network = runtimeapi.NamespaceMode_NODE
		})))
		get(t, "http://127.0.0.1:12003")
		if got := get(t, "http://"+p.Forward(t, 12003)); !strings.Contains(got, welcome) {
			t.Errorf("page: got %q, want %q in it", got, welcome)
		}
	})
	t.Run("a server on IPv6's localhost alone", func(t *testing.T) {
		p := startPod(t, d)
		c := p.Run(harness.ContainerConfig("web", harness.Busybox, harness.Shell("echo over six >/index.html; exec httpd -f -p [::1]:8080 -h /")))
		c.Must("sh", "-c", "until wget -q -O /dev/null http://[::1]:8080; do usleep 20000; done")
		if got := get(t, "http://"+p.Forward(t, 8080)); got != "over six\n" {
			t.Errorf("page: got %q, want over six", got)
		}
	})
	t.Run("a port on which nobody listens ends the connection", func(t *testing.T) {
		conn, err := net.Dial("tcp", startPod(t, d).Forward(t, 81))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(waitLimit)); err != nil {
			t.Fatal(err)
		}
		if data, err := io.ReadAll(conn); len(data) != 0 || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("forwarded port without a server: got %q, error %v; want the connection closed", data, err)
		}
	})
	t.Run("a pod that is not there, or stopped", func(t *testing.T) {
		p := startPod(t, d)
		p.Stop()
		for id, want := range map[string]codes.Code{strings.Repeat("1f", 32): codes.NotFound, p.ID: codes.FailedPrecondition} {
			_, err := d.CRI().PortForward(context.Background(), &runtimeapi.PortForwardRequest{PodSandboxId: id, Port: []int32{80}})
			wantCode(t, err, want)
		}
	})
}
