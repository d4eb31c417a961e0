package stream_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	spdyframe "github.com/moby/spdystream/spdy"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/streaming/pkg/httpstream"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/stream"
)

// stubborn is a Runtime whose programs and servers write one word, and then block until their context ends.
type stubborn struct{ running atomic.Int64 }

func (s *stubborn) stay(ctx context.Context) error {
	s.running.Add(1)
	defer s.running.Add(-1)
	<-ctx.Done()
	return context.Cause(ctx)
}

func (s *stubborn) Exec(ctx context.Context, _ string, req sandbox.ExecRequest) (int32, error) {
	io.WriteString(req.Stdout, "begun")
	return 137, s.stay(ctx)
}

func (s *stubborn) Attach(ctx context.Context, _ string, req sandbox.AttachRequest) error {
	// Like a real runtime, it leaves behind a goroutine that ends with the stream.
	go io.Copy(io.Discard, req.Stdin)
	io.WriteString(req.Stdout, "begun")
	return s.stay(ctx)
}

func (s *stubborn) PortForward(ctx context.Context, _ string, port int32, client io.ReadWriteCloser) error {
	dial := func(context.Context, string, string) (net.Conn, error) {
		ours, theirs := net.Pipe()
		context.AfterFunc(ctx, func() { theirs.Close() }) // the pod's server neither reads nor writes
		return ours, nil
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { s.stay(ctx) })
	return stream.PortForwardTCP(ctx, dial, port, client)
}

// vanisher is a client that will vanish. It starts a session through the relay, signals begun, and returns when the
// session has ended.
type vanisher struct {
	t     *testing.T
	s     *stream.Server
	r     *relay
	begun chan<- struct{}
}

// vanishing lists the kinds of clients that vanish. The flooding ones send more than the server reads.
var vanishing = map[string]func(ctx context.Context, v vanisher){
	"exec SPDY":               func(ctx context.Context, v vanisher) { v.exec(ctx, "SPDY", nil) },
	"exec WebSocket v4":       func(ctx context.Context, v vanisher) { v.exec(ctx, "WebSocket v4", nil) },
	"exec WebSocket v5":       func(ctx context.Context, v vanisher) { v.exec(ctx, "WebSocket v5", nil) },
	"exec SPDY flood":         func(ctx context.Context, v vanisher) { v.exec(ctx, "SPDY", endless{}) },
	"exec WebSocket v5 flood": func(ctx context.Context, v vanisher) { v.exec(ctx, "WebSocket v5", endless{}) },
	"attach SPDY":             func(ctx context.Context, v vanisher) { v.attach(ctx, "SPDY") },
	"attach WebSocket v5":     func(ctx context.Context, v vanisher) { v.attach(ctx, "WebSocket v5") },
	"port-forward":            func(ctx context.Context, v vanisher) { v.forward(ctx, false) },
	"port-forward flood":      func(ctx context.Context, v vanisher) { v.forward(ctx, true) },
}

func (v vanisher) exec(ctx context.Context, protocol string, stdin io.Reader) {
	resp, err := v.s.GetExec(&runtimeapi.ExecRequest{ContainerId: "c", Cmd: []string{"sleep"}, Stdin: true, Stdout: true, Stderr: true})
	if err != nil {
		v.t.Error(err)
		return
	}
	v.stdio(ctx, protocol, resp.Url, stdin)
}

func (v vanisher) attach(ctx context.Context, protocol string) {
	resp, err := v.s.GetAttach(&runtimeapi.AttachRequest{ContainerId: "c", Stdin: true, Stdout: true, Stderr: true})
	if err != nil {
		v.t.Error(err)
		return
	}
	v.stdio(ctx, protocol, resp.Url, nil)
}

func (v vanisher) stdio(ctx context.Context, protocol, u string, stdin io.Reader) {
	typing, typed := io.Pipe()
	defer typed.Close()
	if stdin == nil {
		stdin = typing
	}
	c, err := protocols[protocol](v.r.through(v.t, u))
	if err != nil {
		v.t.Error(err)
		return
	}
	c.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: stopping{ctx, stdin}, Stdout: signal{v.begun}, Stderr: io.Discard})
}

// signal is a writer that sends to a channel for each write.
type signal struct{ to chan<- struct{} }

func (s signal) Write(p []byte) (int, error) {
	s.to <- struct{}{}
	return len(p), nil
}

func (v vanisher) forward(ctx context.Context, flood bool) {
	resp, err := v.s.GetPortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "p", Port: []int32{80}})
	if err != nil {
		v.t.Error(err)
		return
	}
	conn := dialSPDY(v.t, v.r.through(v.t, resp.Url), "portforward.k8s.io")
	if conn == nil {
		return
	}
	defer conn.Close()
	headers := http.Header{}
	headers.Set("port", "80")
	headers.Set("requestID", "1")
	for _, kind := range []string{"error", "data"} {
		headers.Set("streamType", kind)
		st, err := conn.CreateStream(headers)
		if err != nil {
			v.t.Error(err)
			return
		}
		if kind == "data" && flood {
			go io.Copy(st, stopping{ctx, endless{}})
		}
	}
	v.begun <- struct{}{}
	select {
	case <-conn.CloseChan():
	case <-ctx.Done():
	}
}

// dialSPDY opens an SPDY connection. If it cannot, it fails the test and returns nil.
func dialSPDY(t *testing.T, address, protocol string) httpstream.Connection {
	u, err := url.Parse(address)
	if err != nil {
		t.Error(err)
		return nil
	}
	transport, upgrader, err := spdy.RoundTripperFor(&rest.Config{})
	if err != nil {
		t.Error(err)
		return nil
	}
	conn, _, err := spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, http.MethodPost, u).Dial(protocol)
	if err != nil {
		t.Error(err)
		return nil
	}
	return conn
}

// stopping is a reader that returns EOF once its context has ended.
type stopping struct {
	ctx context.Context
	io.Reader
}

func (s stopping) Read(p []byte) (int, error) {
	if s.ctx.Err() != nil {
		return 0, io.EOF
	}
	return s.Reader.Read(p)
}

// TestVanishedClientsC5 checks that clients of all kinds leave nothing behind when they vanish, by a close or by a
// reset.
func TestVanishedClientsC5(t *testing.T) {
	const clients, atATime = 1000, 50
	rt := &stubborn{}
	s := serve(t, stream.Config{Runtime: rt})
	v := vanisher{t: t, s: s, r: newRelay(t, s.Addr().String())}
	before := use(t)
	kinds := slices.Sorted(maps.Keys(vanishing))
	for batch := range clients / atATime {
		vanish(v, batch%2 == 0, func(i int) func(context.Context, vanisher) {
			return vanishing[kinds[(batch*atATime+i)%len(kinds)]]
		}, atATime)
	}
	backTo(t, before)
	if n := rt.running.Load(); n != 0 {
		t.Errorf("%d programs still run without a client", n)
	}
}

// vanish starts n sessions, cuts their clients off, and waits until the clients have returned.
func vanish(v vanisher, reset bool, kind func(i int) func(context.Context, vanisher), n int) {
	begun := make(chan struct{}, n)
	v.begun = begun
	ctx, cancel := context.WithCancel(v.t.Context())
	var wg sync.WaitGroup
	for i := range n {
		begin := kind(i)
		wg.Go(func() { begin(ctx, v) })
	}
	for range n {
		select {
		case <-begun:
		case <-time.After(30 * time.Second):
			v.t.Error("a session did not start within 30 s")
		}
	}
	v.r.cut(reset)
	cancel()
	wg.Wait()
}

// rawSPDY upgrades a connection to SPDY and returns it, without an SPDY library on top.
func rawSPDY(t *testing.T, address, protocol string) *net.TCPConn {
	t.Helper()
	req, err := http.NewRequest("POST", address, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "SPDY/3.1")
	req.Header.Set("X-Stream-Protocol-Version", protocol)
	conn, err := net.Dial("tcp", req.URL.Host)
	if err != nil {
		t.Fatal(err)
	}
	if err := req.Write(conn); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReaderSize(conn, 16), req) // the server sends no frames before the client does
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("upgrade to SPDY = %v, %v, want status 101", resp, err)
	}
	return conn.(*net.TCPConn)
}

// openStreams writes frames that open n streams.
func openStreams(t *testing.T, conn net.Conn, n int, headers func(i int) http.Header) {
	t.Helper()
	var b bytes.Buffer
	framer, err := spdyframe.NewFramer(&b, &b)
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if err := framer.WriteFrame(&spdyframe.SynStreamFrame{StreamId: spdyframe.StreamId(2*i + 1), Headers: headers(i)}); err != nil {
			t.Fatal(err)
		}
	}
	conn.Write(b.Bytes()) // fails if the server has already closed the connection
}

func stdioHeaders(i int) http.Header {
	return http.Header{"Streamtype": {[]string{"error", "stdout", "stderr", "stdout"}[i%4]}}
}

func forwardHeaders(i int) http.Header {
	return http.Header{"Streamtype": {[]string{"error", "data"}[i%2]}, "Port": {"80"}, "Requestid": {fmt.Sprint(i / 2)}}
}

// TestOddClients checks that clients that open too few or too many streams are disconnected and leave nothing behind.
func TestOddClients(t *testing.T) {
	s := serve(t, stream.Config{Runtime: &stubborn{}, CreationTimeout: 2 * time.Second})
	before := use(t)
	for streams := range 12 {
		if streams == 2 {
			continue // the right number
		}
		resp, err := s.GetExec(&runtimeapi.ExecRequest{ContainerId: "c", Cmd: []string{"sleep"}, Stdout: true})
		if err != nil {
			t.Fatal(err)
		}
		conn := rawSPDY(t, resp.Url, "v4.channel.k8s.io")
		openStreams(t, conn, streams, stdioHeaders)
		conn.SetReadDeadline(time.Now().Add(20 * time.Second))
		if _, err := io.Copy(io.Discard, struct{ io.Reader }{conn}); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a client with %d streams was not disconnected within 20 s", streams)
		}
		conn.Close()
	}
	backTo(t, before)
}

// TestGoAway checks that a GOAWAY from the client ends its session, although the connection stays open.
func TestGoAway(t *testing.T) {
	ended := make(chan struct{})
	s := serve(t, stream.Config{Runtime: fakeRuntime{exec: func(ctx context.Context, _ string, req sandbox.ExecRequest) (int32, error) {
		defer close(ended)
		<-ctx.Done()
		return 137, nil
	}}})
	before := use(t)
	resp, err := s.GetExec(&runtimeapi.ExecRequest{ContainerId: "c", Cmd: []string{"sleep"}, Stdout: true})
	if err != nil {
		t.Fatal(err)
	}
	conn := rawSPDY(t, resp.Url, "v4.channel.k8s.io")
	openStreams(t, conn, 2, stdioHeaders)
	var b bytes.Buffer
	framer, err := spdyframe.NewFramer(&b, &b)
	if err != nil {
		t.Fatal(err)
	}
	framer.WriteFrame(&spdyframe.GoAwayFrame{})
	conn.Write(b.Bytes())
	<-ended
	conn.Close()
	backTo(t, before)
}

// TestClientsThatVanishAtOnce checks that clients that vanish while they open their streams leave nothing behind.
func TestClientsThatVanishAtOnce(t *testing.T) {
	s := serve(t, stream.Config{Runtime: &stubborn{}, CreationTimeout: 2 * time.Second})
	before := use(t)
	for i := range 300 {
		exec, err := s.GetExec(&runtimeapi.ExecRequest{ContainerId: "c", Cmd: []string{"sleep"}, Stdout: true})
		if err != nil {
			t.Fatal(err)
		}
		forward, err := s.GetPortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "p"})
		if err != nil {
			t.Fatal(err)
		}
		for _, conn := range []*net.TCPConn{
			begin(t, exec.Url, "v4.channel.k8s.io", 1+i%2, stdioHeaders),
			begin(t, forward.Url, "portforward.k8s.io", 1+i%20, forwardHeaders),
		} {
			if i%3 == 0 {
				conn.SetLinger(0) // a reset
			}
			conn.Close()
		}
	}
	backTo(t, before)
}

// TestCloseWithoutStreams checks that Close does not wait for clients that have not opened all their streams, whether
// they are still connected or not.
func TestCloseWithoutStreams(t *testing.T) {
	s := serve(t, stream.Config{Runtime: &stubborn{}})
	for i := range 3 {
		resp, err := s.GetExec(&runtimeapi.ExecRequest{ContainerId: "c", Cmd: []string{"sleep"}, Stdout: true})
		if err != nil {
			t.Fatal(err)
		}
		conn := begin(t, resp.Url, "v4.channel.k8s.io", i%2, stdioHeaders)
		defer conn.Close()
		if i == 0 {
			conn.Close()
		}
	}
	start := time.Now()
	if err := s.Close(); err != nil {
		t.Errorf("Close = %v after %s, want nil", err, time.Since(start))
	}
}

func begin(t *testing.T, address, protocol string, streams int, headers func(int) http.Header) *net.TCPConn {
	t.Helper()
	conn := rawSPDY(t, address, protocol)
	openStreams(t, conn, streams, headers)
	return conn
}
