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

// execURL asks for an exec session.
func execURL(t *testing.T, s *stream.Server, req *runtimeapi.ExecRequest) string {
	t.Helper()
	req.ContainerId, req.Cmd = "c1", []string{"prog", "arg"}
	resp, err := s.GetExec(req)
	if err != nil {
		t.Fatal(err)
	}
	return resp.Url
}

// client makes a client for a URL in the named protocol.
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

// Output and exit code come through, and the request as it was asked for.
func TestExec(t *testing.T) {
	for _, code := range []int32{0, 1, 42, 255} {
		s := serve(t, stream.Config{Runtime: fakeRuntime{exec: func(_ context.Context, id string, req sandbox.ExecRequest) (int32, error) {
			if id != "c1" || len(req.Cmd) != 2 || req.TTY || req.Stdin != nil || req.Resize != nil {
				t.Errorf("asked to run %v in %s: %+v", req.Cmd, id, req)
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
				t.Errorf("stdout %q, stderr %q", stdout.String(), stderr.String())
			}
			var exit utilexec.CodeExitError
			switch {
			case code == 0 && err != nil:
				t.Errorf("exit code 0 came as %v", err)
			case code != 0 && (!errors.As(err, &exit) || exit.Code != int(code)):
				t.Errorf("exit code %d came as %v", code, err)
			}
		})
	}
}

// A failure is reported as one, not as an exit code, and with its text.
func TestExecFails(t *testing.T) {
	s := serve(t, stream.Config{Runtime: fakeRuntime{exec: func(context.Context, string, sandbox.ExecRequest) (int32, error) {
		return 0, fmt.Errorf("container c1: %w", errdefs.ErrNotFound)
	}}})
	eachProtocol(t, func(t *testing.T, protocol string) {
		url := execURL(t, s, &runtimeapi.ExecRequest{Stdout: true})
		err := client(t, protocol, url).StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdout: io.Discard})
		if err == nil || !strings.Contains(err.Error(), "container c1: not found") || errors.As(err, new(utilexec.CodeExitError)) {
			t.Errorf("error %v", err)
		}
	})
}

// Stdin goes in, its end is seen where the protocol can tell it, and much output comes back whole.
func TestExecStdin(t *testing.T) {
	input := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
	s := serve(t, stream.Config{Runtime: fakeRuntime{exec: func(_ context.Context, _ string, req sandbox.ExecRequest) (int32, error) {
		all := make([]byte, len(input))
		if _, err := io.ReadFull(req.Stdin, all); err != nil {
			return 0, err
		}
		req.Stdout.Write(all) // in one piece, longer than a frame may be for some
		if n, err := io.Copy(io.Discard, req.Stdin); n != 0 || err != nil {
			t.Errorf("after the input came %d bytes, %v", n, err)
		}
		return 0, nil
	}}})
	eachProtocol(t, func(t *testing.T, protocol string) {
		if !canCloseStdin(protocol) {
			return
		}
		var stdout bytes.Buffer
		url := execURL(t, s, &runtimeapi.ExecRequest{Stdin: true, Stdout: true})
		err := client(t, protocol, url).StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdin: bytes.NewReader(input), Stdout: &stdout})
		if err != nil || !bytes.Equal(stdout.Bytes(), input) {
			t.Errorf("%d bytes of %d came back, %v", stdout.Len(), len(input), err)
		}
	})
}

// A program that ends without having read its input: its exit code must not get lost.
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
				t.Fatalf("exit code 7 came as %v", err)
			}
		}
	})
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// Sizes of the terminal come through, and a runtime that does not care for them is not held up.
func TestExecTerminal(t *testing.T) {
	s := serve(t, stream.Config{Runtime: fakeRuntime{exec: func(ctx context.Context, _ string, req sandbox.ExecRequest) (int32, error) {
		if !req.TTY || req.Stderr != nil || req.Resize == nil {
			t.Errorf("request %+v", req)
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
			done <- c.StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdin: stdin, Stdout: stdout, Tty: true, TerminalSizeQueue: sizeQueue(sizes)})
		}()
		sizes <- remotecommand.TerminalSize{Width: 80, Height: 24}
		stdout.waitFor(t, "80x24")
		for height := range 10 {
			sizes <- remotecommand.TerminalSize{Width: 132, Height: uint16(41 + height)}
		}
		stdout.wait(t, func(s string) bool { return strings.HasSuffix(s, "132x50") })
		for range 10 { // nobody takes these
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
			t.Errorf("attach to %s: %+v", id, req)
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
				t.Errorf("stdout %q", stdout.String())
			}
			if failed := err != nil && strings.Contains(err.Error(), "the container has no stdin"); failed != (word == "error") {
				t.Errorf("attach with %q: %v", word, err)
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
			t.Errorf("exec, %s: %v, %v", name, resp, err)
		}
		attach := &runtimeapi.AttachRequest{ContainerId: req.ContainerId, Stdout: req.Stdout, Stderr: req.Stderr, Tty: req.Tty}
		if resp, err := s.GetAttach(attach); name != "no command" && (!errdefs.IsInvalidArgument(err) || resp != nil) {
			t.Errorf("attach, %s: %v, %v", name, resp, err)
		}
	}
	for name, req := range map[string]*runtimeapi.PortForwardRequest{
		"no pod":   {Port: []int32{80}},
		"port 0":   {PodSandboxId: "p", Port: []int32{0}},
		"port -1":  {PodSandboxId: "p", Port: []int32{80, -1}},
		"too high": {PodSandboxId: "p", Port: []int32{65536}},
	} {
		if resp, err := s.GetPortForward(req); !errdefs.IsInvalidArgument(err) || resp != nil {
			t.Errorf("port-forward, %s: %v, %v", name, resp, err)
		}
	}
	if _, err := s.GetPortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "p"}); err != nil {
		t.Errorf("ports may be left to the client: %v", err)
	}
}

func TestAddressMustBeLoopback(t *testing.T) {
	for _, address := range []string{"0.0.0.0:0", ":0", "192.0.2.1:0", "127.0.0.1", "example.com:0", "[::]:0"} {
		s, err := stream.New(stream.Config{Address: address, Runtime: fakeRuntime{}, Logger: slog.New(slog.DiscardHandler)})
		if !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: %v", address, err)
		}
		if s != nil {
			s.Close()
		}
	}
}

// A URL works once, for its own kind of session, and there are not endlessly many.
func TestTokens(t *testing.T) {
	s := serve(t, stream.Config{MaxTokens: 3, Runtime: fakeRuntime{}})
	urls := map[string]bool{}
	for range 3 {
		urls[execURL(t, s, &runtimeapi.ExecRequest{Stdout: true})] = true
	}
	if len(urls) != 3 {
		t.Errorf("three requests have %d URLs", len(urls))
	}
	if _, err := s.GetPortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "p"}); !errdefs.IsResourceExhausted(err) {
		t.Errorf("one too many: %v", err)
	}
	for u := range urls {
		for what, wrong := range map[string]string{"other kind": strings.Replace(u, "/exec/", "/attach/", 1), "other token": u[:len(u)-1] + "0"} {
			if code := get(t, wrong); code != http.StatusNotFound {
				t.Errorf("%s: status %d", what, code)
			}
		}
		if code := get(t, u); code == http.StatusNotFound {
			t.Error("the right URL is not known")
		}
		if code := get(t, u); code != http.StatusNotFound {
			t.Errorf("used again: status %d", code)
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

// Close ends the sessions under way, and their clients hear of it.
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
			t.Errorf("Close took %s: %v", time.Since(start), err)
		}
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
		if err := <-ended; err == nil {
			t.Error("the client was told that the program ended well")
		}
		if _, err := http.Get(url); err == nil {
			t.Error("the server still listens")
		}
	})
}
