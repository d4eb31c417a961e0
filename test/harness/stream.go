package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"testing"
	"time"

	protocol "k8s.io/apimachinery/pkg/util/remotecommand"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	utilexec "k8s.io/client-go/util/exec"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/streaming/pkg/httpstream"
)

// Protocol is a streaming protocol. The clients are the libraries that kubectl uses.
type Protocol string

// Values of Protocol. WebSocket means version 4, which every CRI server supports, but which cannot signal the end of
// stdin.
const (
	SPDY        Protocol = "SPDY"
	WebSocket   Protocol = "WebSocket"
	WebSocketV5 Protocol = "WebSocket v5"
)

// Protocols lists the protocols that every server supports. HalfClosing lists the protocols that can signal the end of
// stdin.
var (
	Protocols   = []Protocol{SPDY, WebSocket}
	HalfClosing = []Protocol{SPDY, WebSocketV5}
)

// Stream connects standard streams to the URL from Exec or Attach. It returns the program's exit code; a nonzero code
// is not an error.
func Stream(ctx context.Context, p Protocol, rawURL string, o remotecommand.StreamOptions) (int, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return 0, err
	}
	var e remotecommand.Executor
	switch p {
	case WebSocket:
		e, err = remotecommand.NewWebSocketExecutorForProtocols(&rest.Config{}, http.MethodGet, rawURL, protocol.StreamProtocolV4Name)
	case WebSocketV5:
		e, err = remotecommand.NewWebSocketExecutor(&rest.Config{}, http.MethodGet, rawURL)
	default:
		e, err = remotecommand.NewSPDYExecutor(&rest.Config{}, http.MethodPost, u)
	}
	if err != nil {
		return 0, err
	}
	err = e.StreamWithContext(ctx, o)
	if exit, ok := errors.AsType[utilexec.CodeExitError](err); ok {
		return exit.Code, nil
	}
	return 0, err
}

// ExecResult is the result of a streaming Exec.
type ExecResult struct {
	Stdout, Stderr string
	Code           int
}

// Exec runs a command in the container over a stream. If tty is set, Stdout contains all output.
func (c *Container) Exec(p Protocol, stdin io.Reader, tty bool, argv ...string) ExecResult {
	c.Pod.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	resp, err := c.Pod.d.Runtime().Exec(ctx, &runtimeapi.ExecRequest{
		ContainerId: c.ID, Cmd: argv, Tty: tty, Stdin: stdin != nil, Stdout: true, Stderr: !tty,
	})
	if err != nil {
		c.Pod.t.Fatalf("Exec %q: %v", argv, err)
	}
	var stdout, stderr bytes.Buffer
	o := remotecommand.StreamOptions{Stdin: stdin, Stdout: &stdout, Tty: tty}
	if !tty {
		o.Stderr = &stderr
	}
	code, err := Stream(ctx, p, resp.Url, o)
	if err != nil {
		c.Pod.t.Fatalf("Exec %q over %s: %v (stdout %q, stderr %q)", argv, p, err, &stdout, &stderr)
	}
	return ExecResult{Stdout: stdout.String(), Stderr: stderr.String(), Code: code}
}

// AttachURL returns the URL of a stream to the container's own standard streams.
func (c *Container) AttachURL(stdin, tty bool) string {
	c.Pod.t.Helper()
	resp, err := c.Pod.d.Runtime().Attach(context.Background(), &runtimeapi.AttachRequest{
		ContainerId: c.ID, Stdin: stdin, Tty: tty, Stdout: true, Stderr: !tty,
	})
	if err != nil {
		c.Pod.t.Fatalf("Attach: %v", err)
	}
	return resp.Url
}

// Forward forwards a local port to a port of the pod over SPDY until the test ends. It returns the local HOST:PORT.
func (p *Pod) Forward(t testing.TB, port int32) string {
	t.Helper()
	resp, err := p.d.Runtime().PortForward(context.Background(), &runtimeapi.PortForwardRequest{PodSandboxId: p.ID, Port: []int32{port}})
	if err != nil {
		t.Fatalf("PortForward: %v", err)
	}
	dialer, err := spdyDialer(resp.Url)
	if err != nil {
		t.Fatal(err)
	}
	stop, ready, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	f, err := portforward.NewOnAddressesForStreaming(dialer, []string{"127.0.0.1"}, []string{fmt.Sprintf("0:%d", port)}, stop, ready,
		io.Discard, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	go func() { ended <- f.ForwardPorts() }()
	t.Cleanup(func() {
		close(stop)
		if err := <-ended; err != nil {
			t.Logf("port-forward to %d ended: %v", port, err)
		}
	})
	select {
	case <-ready:
	case err := <-ended:
		ended <- err
		t.Fatalf("port-forward to %d: %v", port, err)
	case <-time.After(30 * time.Second):
		t.Fatalf("port-forward to %d is not ready", port)
	}
	ports, err := f.GetPorts()
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", ports[0].Local)
}

func spdyDialer(rawURL string) (httpstream.Dialer, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, err
	}
	transport, upgrader, err := spdy.RoundTripperFor(&rest.Config{})
	if err != nil {
		return nil, err
	}
	return spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, http.MethodPost, u), nil
}
