package stream_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/gorilla/websocket"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/streaming/pkg/httpstream"

	"github.com/tripod-run/tripod/internal/stream"
)

// podServer starts a TCP server that handles each connection with serve, and returns its port.
func podServer(t *testing.T, network, address string, serve func(*net.TCPConn)) int32 {
	t.Helper()
	listener, err := net.Listen(network, address)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				serve(conn.(*net.TCPConn))
			})
		}
	})
	t.Cleanup(func() {
		listener.Close()
		wg.Wait()
	})
	return int32(listener.Addr().(*net.TCPAddr).Port)
}

// echo reads until the client half-closes the connection, and sends everything back.
func echo(conn *net.TCPConn) {
	all, err := io.ReadAll(conn)
	if err == nil {
		conn.Write(all)
	}
}

// dialHost is a stream.Dial for the network of this process.
func dialHost(ctx context.Context, network, address string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, network, address)
}

// hostRuntime returns a Runtime that forwards to the network of this process.
func hostRuntime() fakeRuntime {
	return fakeRuntime{forward: func(ctx context.Context, _ string, port int32, s io.ReadWriteCloser) error {
		return stream.PortForwardTCP(ctx, dialHost, port, s)
	}}
}

// TestPortForwardTCP checks both directions and half-close, with IPv4 and IPv6.
func TestPortForwardTCP(t *testing.T) {
	message := bytes.Repeat([]byte("0123456789"), 100_000)
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		before := use(t)
		t.Run(address, func(t *testing.T) {
			port := podServer(t, "tcp", address, echo)
			ours, theirs := tcpPair(t)
			done := make(chan error, 1)
			go func() { done <- stream.PortForwardTCP(t.Context(), dialHost, port, halfCloser{theirs}) }()
			ours.Write(message)
			ours.CloseWrite()
			if got, err := io.ReadAll(ours); err != nil || !bytes.Equal(got, message) {
				t.Errorf("read %d bytes, %v, want the %d bytes of the message", len(got), err, len(message))
			}
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		backTo(t, before)
	}
}

// halfCloser is a stream like an SPDY stream: Close closes one direction, Reset both. It hides the connection's other
// methods so that io.Copy does not use splice(2), whose pipes stay open for a while.
type halfCloser struct{ conn *net.TCPConn }

func (h halfCloser) Read(p []byte) (int, error)  { return h.conn.Read(p) }
func (h halfCloser) Write(p []byte) (int, error) { return h.conn.Write(p) }
func (h halfCloser) Close() error                { return h.conn.CloseWrite() }
func (h halfCloser) Reset() error                { return h.conn.Close() }

func tcpPair(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	client, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	server, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close(); server.Close() })
	return client.(*net.TCPConn), server.(*net.TCPConn)
}

// TestPortForwardTCPEnds checks what PortForwardTCP returns when it cannot connect, when its context ends, and when the
// pod resets the connection.
func TestPortForwardTCPEnds(t *testing.T) {
	before := use(t)
	t.Run("nobody listens", func(t *testing.T) {
		_, theirs := tcpPair(t)
		if err := stream.PortForwardTCP(t.Context(), dialHost, 1, theirs); !errdefs.IsUnavailable(err) ||
			!strings.Contains(err.Error(), "port 1 ") {
			t.Errorf("PortForwardTCP = %v, want unavailable with the port's number", err)
		}
	})
	t.Run("no port", func(t *testing.T) {
		for _, port := range []int32{-1, 0, 65536} {
			if err := stream.PortForwardTCP(t.Context(), dialHost, port, nil); !errdefs.IsInvalidArgument(err) {
				t.Errorf("PortForwardTCP for port %d = %v, want an invalid argument", port, err)
			}
		}
	})
	t.Run("context ends", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		reached := make(chan struct{})
		port := podServer(t, "tcp", "127.0.0.1:0", func(conn *net.TCPConn) {
			close(reached)
			io.Copy(io.Discard, conn)
		})
		_, theirs := tcpPair(t)
		done := make(chan error, 1)
		go func() { done <- stream.PortForwardTCP(ctx, dialHost, port, halfCloser{theirs}) }()
		<-reached
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("PortForwardTCP = %v, want context.Canceled", err)
		}
	})
	t.Run("pod resets", func(t *testing.T) {
		port := podServer(t, "tcp", "127.0.0.1:0", func(conn *net.TCPConn) {
			conn.Read(make([]byte, 1)) // an immediate reset would look as if nothing listened
			conn.SetLinger(0)
		})
		ours, theirs := tcpPair(t)
		done := make(chan error, 1)
		go func() { done <- stream.PortForwardTCP(t.Context(), dialHost, port, halfCloser{theirs}) }()
		for { // send until the reset arrives
			if _, err := ours.Write(make([]byte, 4096)); err != nil {
				break
			}
		}
		if err := <-done; err != nil {
			t.Errorf("PortForwardTCP after a reset by the pod = %v, want nil", err)
		}
	})
	backTo(t, before)
}

// TestPortForwardSession forwards many connections over one session, with the client of kubectl port-forward, over SPDY and
// over SPDY inside of a WebSocket.
func TestPortForwardSession(t *testing.T) {
	for name, dialer := range map[string]func(*url.URL) (httpstream.Dialer, error){
		"SPDY": func(u *url.URL) (httpstream.Dialer, error) {
			transport, upgrader, err := spdy.RoundTripperFor(&rest.Config{})
			return spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, "POST", u), err
		},
		"WebSocket": func(u *url.URL) (httpstream.Dialer, error) {
			return portforward.NewSPDYOverWebsocketDialerForStreaming(u, &rest.Config{})
		},
	} {
		before := use(t)
		t.Run(name, func(t *testing.T) { testPortForwardSession(t, dialer) })
		backTo(t, before)
	}
}

// portForwardURL returns the URL of a new session with the pod "p".
func portForwardURL(t *testing.T, s *stream.Server) *url.URL {
	t.Helper()
	resp, err := s.GetPortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "p"})
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(resp.Url)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func testPortForwardSession(t *testing.T, dial func(*url.URL) (httpstream.Dialer, error)) {
	port := podServer(t, "tcp", "127.0.0.1:0", echo)
	s := serve(t, stream.Config{Runtime: hostRuntime()})
	u := portForwardURL(t, s)
	dialer, err := dial(u)
	if err != nil {
		t.Fatal(err)
	}
	stop, ready := make(chan struct{}), make(chan struct{})
	pf, err := portforward.NewForStreaming(dialer, []string{fmt.Sprintf("0:%d", port)}, stop, ready, io.Discard, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- pf.ForwardPorts() }()
	select {
	case <-ready:
	case err := <-done:
		t.Fatal(err)
	}
	ports, err := pf.GetPorts()
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", ports[0].Local))
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			message := bytes.Repeat([]byte{byte(i)}, 200_000)
			conn.Write(message)
			conn.(*net.TCPConn).CloseWrite()
			if got, err := io.ReadAll(conn); err != nil || !bytes.Equal(got, message) {
				t.Errorf("connection %d: read %d bytes, %v, want the %d bytes of the message", i, len(got), err, len(message))
			}
		})
	}
	wg.Wait()
	close(stop)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestTunnelEndsIdle: a session that the server ends reads on until the client closes, too, beside the protocol library, which
// still reads.
func TestTunnelEndsIdle(t *testing.T) {
	var mu sync.Mutex
	var log bytes.Buffer
	logger := slog.New(slog.NewTextHandler(writerFunc(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return log.Write(p)
	}), &slog.HandlerOptions{Level: slog.LevelDebug}))
	s := serve(t, stream.Config{Runtime: hostRuntime(), IdleTimeout: 100 * time.Millisecond, Logger: logger})
	for range 10 {
		u := portForwardURL(t, s)
		dialer, err := portforward.NewSPDYOverWebsocketDialerForStreaming(u, &rest.Config{})
		if err != nil {
			t.Fatal(err)
		}
		conn, _, err := dialer.Dial("portforward.k8s.io")
		if err != nil {
			t.Fatal(err)
		}
		select {
		case <-conn.CloseChan():
		case <-time.After(time.Minute):
			t.Error("the idle session does not end")
		}
		conn.Close()
	}
	mu.Lock()
	defer mu.Unlock()
	if strings.Contains(log.String(), "panic") {
		t.Errorf("log:\n%s", log.String())
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// TestPortForwardOtherPort checks that a port that the URL was not issued for is refused with the reason. The refusal
// is fast, but must not overtake the answer to its stream: once, one in twenty did.
func TestPortForwardOtherPort(t *testing.T) {
	s := serve(t, stream.Config{Runtime: hostRuntime()})
	resp, err := s.GetPortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "p", Port: []int32{80}})
	if err != nil {
		t.Fatal(err)
	}
	conn := dialSPDY(t, resp.Url, "portforward.k8s.io")
	defer conn.Close()
	for i := range 300 {
		headers := http.Header{"Port": {"22"}, "Requestid": {strconv.Itoa(i)}, "Streamtype": {"error"}}
		errs, err := conn.CreateStream(headers)
		if err != nil {
			t.Fatal(err)
		}
		headers.Set("streamType", "data")
		if _, err := conn.CreateStream(headers); err != nil {
			t.Fatalf("create the data stream of connection %d: %v", i, err)
		}
		if text, err := io.ReadAll(errs); err != nil || !strings.Contains(string(text), "port 22 was not requested") {
			t.Fatalf("connection %d: error stream = %q, %v, want that port 22 was not requested", i, text, err)
		}
	}
}

// TestPortForwardWebSocket checks the WebSocket protocol: two channels per requested port, each of which begins with
// the port's number.
func TestPortForwardWebSocket(t *testing.T) {
	port := podServer(t, "tcp", "127.0.0.1:0", func(conn *net.TCPConn) {
		line := make([]byte, 5)
		io.ReadFull(conn, line)
		conn.Write(bytes.ToUpper(line))
	})
	s := serve(t, stream.Config{Runtime: hostRuntime()})
	resp, err := s.GetPortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "p", Port: []int32{port}})
	if err != nil {
		t.Fatal(err)
	}
	dialer := websocket.Dialer{Subprotocols: []string{"v4.channel.k8s.io"}, HandshakeTimeout: 10 * time.Second}
	conn, _, err := dialer.Dial(strings.Replace(resp.Url, "http://", "ws://", 1), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.WriteMessage(websocket.BinaryMessage, []byte("\x00hello"))
	var got [2][]byte
	for {
		_, data, err := conn.ReadMessage()
		if err != nil {
			break
		}
		got[data[0]] = append(got[data[0]], data[1:]...)
	}
	number := []byte{byte(port), byte(port >> 8)}
	if !bytes.Equal(got[0], append(bytes.Clone(number), "HELLO"...)) || !bytes.Equal(got[1], number) {
		t.Errorf("data channel = %q, error channel = %q, want %q with HELLO, and %q", got[0], got[1], number, number)
	}
}

// TestUnknownSubprotocol checks that a client that asks only for subprotocols that are not spoken learns those that are.
func TestUnknownSubprotocol(t *testing.T) {
	s := serve(t, stream.Config{Runtime: hostRuntime()})
	exec, err1 := s.GetExec(&runtimeapi.ExecRequest{ContainerId: "c", Cmd: []string{"x"}, Stdout: true})
	forward, err2 := s.GetPortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "p", Port: []int32{80}})
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	for session, want := range map[string]string{exec.Url: "v5.channel.k8s.io", forward.Url: "SPDY/3.1+portforward.k8s.io"} {
		dialer := websocket.Dialer{Subprotocols: []string{"v9.channel.k8s.io"}, HandshakeTimeout: 10 * time.Second}
		_, resp, err := dialer.Dial(strings.Replace(session, "http://", "ws://", 1), nil)
		if err == nil || resp == nil {
			t.Fatalf("%s: %v, response %v, want a refusal", session, err, resp)
		}
		if text, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusBadRequest || !strings.Contains(string(text), want) {
			t.Errorf("%s: status %d, body %q, %v; want 400 with %q", session, resp.StatusCode, text, err, want)
		}
	}
}
