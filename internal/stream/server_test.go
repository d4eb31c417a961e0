package stream_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/client-go/tools/remotecommand"
	utilexec "k8s.io/client-go/util/exec"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/stream"
)

// execURL returns the URL of a new exec session.
func execURL(t *testing.T, s *stream.Server, req *runtimeapi.ExecRequest) string {
	t.Helper()
	req.ContainerId, req.Cmd = "c1", []string{"prog", "arg"}
	resp, err := s.GetExec(req)
	if err != nil {
		t.Fatal(err)
	}
	return resp.Url
}

// client makes a client for a URL that uses the named protocol.
func client(t *testing.T, protocol, url string) remotecommand.Executor {
	t.Helper()
	c, err := protocols[protocol](url)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func eachProtocol(t *testing.T, test func(t *testing.T, protocol string)) {
	for protocol := range protocols {
		t.Run(protocol, func(t *testing.T) { test(t, protocol) })
	}
}

// TestExec checks that the runtime gets the request, and the client gets the output and the exit code.
func TestExec(t *testing.T) {
	for _, code := range []int32{0, 1, 42, 255} {
		s := serve(t, stream.Config{Runtime: fakeRuntime{exec: func(_ context.Context, id string, req sandbox.ExecRequest) (int32, error) {
			if id != "c1" || len(req.Cmd) != 2 || req.TTY || req.Stdin != nil || req.Resize != nil {
				t.Errorf("Exec(%s, %+v), want container c1, two words, no terminal and no stdin", id, req)
			}
			fmt.Fprint(req.Stdout, "out of ", req.Cmd[0])
			fmt.Fprint(req.Stderr, "err of ", req.Cmd[1])
			return code, nil
		}}})
		eachProtocol(t, func(t *testing.T, protocol string) {
			var stdout, stderr bytes.Buffer
			url := execURL(t, s, &runtimeapi.ExecRequest{Stdout: true, Stderr: true})
			err := client(t, protocol, url).StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdout: &stdout, Stderr: &stderr})
			if stdout.String() != "out of prog" || stderr.String() != "err of arg" {
				t.Errorf("stdout = %q, stderr = %q, want \"out of prog\" and \"err of arg\"", stdout.String(), stderr.String())
			}
			var exit utilexec.CodeExitError
			switch {
			case code == 0 && err != nil:
				t.Errorf("client's result of exit code 0 = %v, want nil", err)
			case code != 0 && (!errors.As(err, &exit) || exit.Code != int(code)):
				t.Errorf("client's result of exit code %d = %v, want a CodeExitError", code, err)
			}
		})
	}
}

// TestExecFails checks that a failure of Exec reaches the client with its text, and not as an exit code.
func TestExecFails(t *testing.T) {
	s := serve(t, stream.Config{Runtime: fakeRuntime{exec: func(context.Context, string, sandbox.ExecRequest) (int32, error) {
		return 0, fmt.Errorf("container c1: %w", errdefs.ErrNotFound)
	}}})
	eachProtocol(t, func(t *testing.T, protocol string) {
		url := execURL(t, s, &runtimeapi.ExecRequest{Stdout: true})
		err := client(t, protocol, url).StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdout: io.Discard})
		if err == nil || !strings.Contains(err.Error(), "container c1: not found") || errors.As(err, new(utilexec.CodeExitError)) {
			t.Errorf("client's result = %v, want the error of Exec and no CodeExitError", err)
		}
	})
}

// TestExecStdin checks that the program gets all of stdin and its end, and that the client gets all of a large output.
func TestExecStdin(t *testing.T) {
	input := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
	s := serve(t, stream.Config{Runtime: fakeRuntime{exec: func(_ context.Context, _ string, req sandbox.ExecRequest) (int32, error) {
		all := make([]byte, len(input))
		if _, err := io.ReadFull(req.Stdin, all); err != nil {
			return 0, err
		}
		req.Stdout.Write(all) // one write, longer than some clients accept as a frame
		if n, err := io.Copy(io.Discard, req.Stdin); n != 0 || err != nil {
			t.Errorf("read %d more bytes after the input, %v, want EOF", n, err)
		}
		return 0, nil
	}}})
	eachProtocol(t, func(t *testing.T, protocol string) {
		if !canCloseStdin(protocol) {
			return
		}
		var stdout bytes.Buffer
		url := execURL(t, s, &runtimeapi.ExecRequest{Stdin: true, Stdout: true})
		err := client(t, protocol, url).StreamWithContext(t.Context(),
			remotecommand.StreamOptions{Stdin: bytes.NewReader(input), Stdout: &stdout})
		if err != nil || !bytes.Equal(stdout.Bytes(), input) {
			t.Errorf("client got %d bytes of stdout, %v, want the %d bytes of the input", stdout.Len(), err, len(input))
		}
	})
}

// TestExecEndsBeforeItsInput checks that the exit code of a program that does not read all its input reaches the
// client.
func TestExecEndsBeforeItsInput(t *testing.T) {
	s := serve(t, stream.Config{Runtime: fakeRuntime{exec: func(_ context.Context, _ string, req sandbox.ExecRequest) (int32, error) {
		_, err := io.ReadFull(req.Stdin, make([]byte, 10))
		return 7, err
	}}})
	eachProtocol(t, func(t *testing.T, protocol string) {
		for range 20 {
			url := execURL(t, s, &runtimeapi.ExecRequest{Stdin: true, Stdout: true})
			err := client(t, protocol, url).StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdin: endless{}, Stdout: io.Discard})
			var exit utilexec.CodeExitError
			if !errors.As(err, &exit) || exit.Code != 7 {
				t.Fatalf("client's result = %v, want exit code 7", err)
			}
		}
	})
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// TestExecTerminal checks that the runtime gets the terminal's sizes, and that sizes that it does not read block
// nothing.
func TestExecTerminal(t *testing.T) {
	s := serve(t, stream.Config{Runtime: fakeRuntime{exec: func(ctx context.Context, _ string, req sandbox.ExecRequest) (int32, error) {
		if !req.TTY || req.Stderr != nil || req.Resize == nil {
			t.Errorf("Exec got the request %+v, want a terminal with sizes and no stderr", req)
		}
		for size := range req.Resize {
			fmt.Fprintf(req.Stdout, "%dx%d", size.Width, size.Height)
			if size.Height == 50 {
				break
			}
		}
		_, err := io.ReadFull(req.Stdin, make([]byte, 4))
		return 0, err
	}}})
	eachProtocol(t, func(t *testing.T, protocol string) {
		stdout, sizes := newExpecting(), make(chan remotecommand.TerminalSize)
		stdin, typing := io.Pipe()
		done := make(chan error, 1)
		url := execURL(t, s, &runtimeapi.ExecRequest{Stdin: true, Stdout: true, Tty: true})
		c := client(t, protocol, url)
		go func() {
			done <- c.StreamWithContext(t.Context(),
				remotecommand.StreamOptions{Stdin: stdin, Stdout: stdout, Tty: true, TerminalSizeQueue: sizeQueue(sizes)})
		}()
		sizes <- remotecommand.TerminalSize{Width: 80, Height: 24}
		stdout.waitFor(t, "80x24")
		for height := range 10 {
			sizes <- remotecommand.TerminalSize{Width: 132, Height: uint16(41 + height)}
		}
		stdout.wait(t, func(s string) bool { return strings.HasSuffix(s, "132x50") })
		for range 10 { // the runtime does not read these
			sizes <- remotecommand.TerminalSize{Width: 1, Height: 1}
		}
		io.WriteString(typing, "exit")
		if err := <-done; err != nil {
			t.Error(err)
		}
		close(sizes)
		typing.Close()
	})
}

type sizeQueue chan remotecommand.TerminalSize

func (q sizeQueue) Next() *remotecommand.TerminalSize {
	size, ok := <-q
	if !ok {
		return nil
	}
	return &size
}

func TestAttach(t *testing.T) {
	s := serve(t, stream.Config{Runtime: fakeRuntime{attach: func(ctx context.Context, id string, req sandbox.AttachRequest) error {
		if id != "c1" || req.TTY || req.Stderr == nil {
			t.Errorf("Attach(%s, %+v), want container c1, stderr and no terminal", id, req)
		}
		line := make([]byte, 5)
		if _, err := io.ReadFull(req.Stdin, line); err != nil {
			return err
		}
		fmt.Fprintf(req.Stdout, "got %s", line)
		if string(line) == "error" {
			return errors.New("the container has no stdin")
		}
		return nil
	}}})
	eachProtocol(t, func(t *testing.T, protocol string) {
		for _, word := range []string{"hello", "error"} {
			resp, err := s.GetAttach(&runtimeapi.AttachRequest{ContainerId: "c1", Stdin: true, Stdout: true, Stderr: true})
			if err != nil {
				t.Fatal(err)
			}
			var stdout bytes.Buffer
			err = client(t, protocol, resp.Url).StreamWithContext(t.Context(), remotecommand.StreamOptions{
				Stdin: strings.NewReader(word), Stdout: &stdout, Stderr: io.Discard,
			})
			if stdout.String() != "got "+word {
				t.Errorf("stdout = %q, want \"got %s\"", stdout.String(), word)
			}
			if failed := err != nil && strings.Contains(err.Error(), "the container has no stdin"); failed != (word == "error") {
				t.Errorf("client's result after input %q = %v, want Attach's error only for \"error\"", word, err)
			}
		}
	})
}

func TestRequestsAreChecked(t *testing.T) {
	s := serve(t, stream.Config{Runtime: fakeRuntime{}})
	cmd := []string{"true"}
	for name, req := range map[string]*runtimeapi.ExecRequest{
		"no container":       {Cmd: cmd, Stdout: true},
		"no command":         {ContainerId: "c", Stdout: true},
		"no stream":          {ContainerId: "c", Cmd: cmd},
		"terminal and error": {ContainerId: "c", Cmd: cmd, Stdout: true, Stderr: true, Tty: true},
	} {
		if resp, err := s.GetExec(req); !errdefs.IsInvalidArgument(err) || resp != nil {
			t.Errorf("%s: GetExec = %v, %v, want an invalid argument", name, resp, err)
		}
		attach := &runtimeapi.AttachRequest{ContainerId: req.ContainerId, Stdout: req.Stdout, Stderr: req.Stderr, Tty: req.Tty}
		if resp, err := s.GetAttach(attach); name != "no command" && (!errdefs.IsInvalidArgument(err) || resp != nil) {
			t.Errorf("%s: GetAttach = %v, %v, want an invalid argument", name, resp, err)
		}
	}
	for name, req := range map[string]*runtimeapi.PortForwardRequest{
		"no pod":   {Port: []int32{80}},
		"port 0":   {PodSandboxId: "p", Port: []int32{0}},
		"port -1":  {PodSandboxId: "p", Port: []int32{80, -1}},
		"too high": {PodSandboxId: "p", Port: []int32{65536}},
	} {
		if resp, err := s.GetPortForward(req); !errdefs.IsInvalidArgument(err) || resp != nil {
			t.Errorf("%s: GetPortForward = %v, %v, want an invalid argument", name, resp, err)
		}
	}
	if _, err := s.GetPortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "p"}); err != nil {
		t.Errorf("GetPortForward without ports = %v, want nil", err)
	}
}

func TestAddressMustBeLoopback(t *testing.T) {
	for _, address := range []string{"0.0.0.0:0", ":0", "192.0.2.1:0", "127.0.0.1", "example.com:0", "[::]:0"} {
		s, err := stream.New(stream.Config{Address: address, Runtime: fakeRuntime{}, Logger: slog.New(slog.DiscardHandler)})
		if !errdefs.IsInvalidArgument(err) {
			t.Errorf("New with address %s = %v, want an invalid argument", address, err)
		}
		if s != nil {
			s.Close()
		}
	}
}

// TestTokens checks that a URL works once and only for its own kind of session, and that the number of URLs is limited.
func TestTokens(t *testing.T) {
	s := serve(t, stream.Config{MaxTokens: 3, Runtime: fakeRuntime{}})
	urls := map[string]bool{}
	for range 3 {
		urls[execURL(t, s, &runtimeapi.ExecRequest{Stdout: true})] = true
	}
	if len(urls) != 3 {
		t.Errorf("three requests got %d different URLs, want 3", len(urls))
	}
	if _, err := s.GetPortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "p"}); !errdefs.IsResourceExhausted(err) {
		t.Errorf("GetPortForward beyond MaxTokens = %v, want resource exhausted", err)
	}
	for u := range urls {
		for what, wrong := range map[string]string{"other kind": strings.Replace(u, "/exec/", "/attach/", 1), "other token": u[:len(u)-1] + "0"} {
			if code := get(t, wrong); code != http.StatusNotFound {
				t.Errorf("URL with %s: status %d, want 404", what, code)
			}
		}
		if code := get(t, u); code == http.StatusNotFound {
			t.Error("first use of a URL: status 404")
		}
		if code := get(t, u); code != http.StatusNotFound {
			t.Errorf("second use of a URL: status %d, want 404", code)
		}
	}
	execURL(t, s, &runtimeapi.ExecRequest{Stdout: true})
}

func get(t *testing.T, url string) int {
	t.Helper()
	resp, err := http.Post(url, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	return resp.StatusCode
}

// TestCloseEndsSessions checks that Close ends running sessions, and that their clients get an error.
func TestCloseEndsSessions(t *testing.T) {
	eachProtocol(t, func(t *testing.T, protocol string) {
		running := make(chan struct{})
		s, err := stream.New(stream.Config{Logger: slog.New(slog.DiscardHandler), Runtime: fakeRuntime{
			exec: func(ctx context.Context, _ string, _ sandbox.ExecRequest) (int32, error) {
				close(running)
				<-ctx.Done()
				return 0, context.Cause(ctx)
			},
		}})
		if err != nil {
			t.Fatal(err)
		}
		served, ended := make(chan error, 1), make(chan error, 1)
		go func() { served <- s.Serve(t.Context()) }()
		url := execURL(t, s, &runtimeapi.ExecRequest{Stdout: true})
		c := client(t, protocol, url)
		go func() {
			ended <- c.StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdout: io.Discard})
		}()
		<-running
		start := time.Now()
		if err := s.Close(); err != nil || time.Since(start) > 4*time.Second {
			t.Errorf("Close = %v after %s, want nil within 4 s", err, time.Since(start))
		}
		if err := <-served; err != nil {
			t.Errorf("Serve = %v, want nil", err)
		}
		if err := <-ended; err == nil {
			t.Error("client's result = nil, want an error")
		}
		if _, err := http.Get(url); err == nil {
			t.Error("the server still listens")
		}
	})
}
