package stream_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
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

	"github.com/tripod-run/tripod/internal/stream"
)

// podServer is a TCP server that handles each connection with serve.
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

// echo sends all back when the client has said that it is done.
func echo(conn *net.TCPConn) {
	all, err := io.ReadAll(conn)
	if err == nil {
		conn.Write(all)
	}
}

// dialHost is a stream.Dial into the network of this process.
func dialHost(ctx context.Context, network, address string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, network, address)
}

// hostRuntime forwards to this process's network.
func hostRuntime() fakeRuntime {
	return fakeRuntime{forward: func(ctx context.Context, _ string, port int32, s io.ReadWriteCloser) error {
		return stream.PortForwardTCP(ctx, dialHost, port, s)
	}}
}

// Both directions, with half-close, on IPv4 and on IPv6.
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
				t.Errorf("%d of %d bytes came back, %v", len(got), len(message), err)
			}
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		backTo(t, before)
	}
}

// halfCloser is a stream whose Close ends one direction, as that of an SPDY stream does, and whose Reset ends both.
// It shows no more of the connection, lest io.Copy use splice(2), whose pipes stay open for a while.
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

// Nobody listens, no such port, the client's context ends, the pod's server hangs up in the middle.
func TestPortForwardTCPEnds(t *testing.T) {
	before := use(t)
	t.Run("nobody listens", func(t *testing.T) {
		_, theirs := tcpPair(t)
		if err := stream.PortForwardTCP(t.Context(), dialHost, 1, theirs); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "port 1 ") {
			t.Error(err)
		}
	})
	t.Run("no port", func(t *testing.T) {
		for _, port := range []int32{-1, 0, 65536} {
			if err := stream.PortForwardTCP(t.Context(), dialHost, port, nil); !errdefs.IsInvalidArgument(err) {
				t.Errorf("port %d: %v", port, err)
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
			t.Error(err)
		}
	})
	t.Run("pod resets", func(t *testing.T) {
		port := podServer(t, "tcp", "127.0.0.1:0", func(conn *net.TCPConn) {
			conn.Read(make([]byte, 1)) // a reset at once would look like nobody listening
			conn.SetLinger(0)
		})
		ours, theirs := tcpPair(t)
		done := make(chan error, 1)
		go func() { done <- stream.PortForwardTCP(t.Context(), dialHost, port, halfCloser{theirs}) }()
		for { // the client sends until it learns
			if _, err := ours.Write(make([]byte, 4096)); err != nil {
				break
			}
		}
		if err := <-done; err != nil {
			t.Errorf("a connection's end was told as the session's: %v", err)
		}
	})
	backTo(t, before)
}

// A whole kubectl port-forward: many connections over one session, one of them to a port where nobody listens.
func TestPortForwardSession(t *testing.T) {
	port := podServer(t, "tcp", "127.0.0.1:0", echo)
	s := serve(t, stream.Config{Runtime: hostRuntime()})
	resp, err := s.GetPortForward(&runtimeapi.PortForwardRequest{PodSandboxId: "p"})
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(resp.Url)
	if err != nil {
		t.Fatal(err)
	}
	transport, upgrader, err := spdy.RoundTripperFor(&rest.Config{})
	if err != nil {
		t.Fatal(err)
	}
	dialer := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, "POST", u)
	stop, ready := make(chan struct{}), make(chan struct{})
	pf, err := portforward.New(dialer, []string{fmt.Sprintf("0:%d", port)}, stop, ready, io.Discard, io.Discard)
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
				t.Errorf("connection %d: %d bytes came back, %v", i, len(got), err)
			}
		})
	}
	wg.Wait()
	close(stop)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Ports beyond those that the URL was made for are refused, with the reason. A refusal is quick, and may not reach the
// client before the answer to the stream that it is about: one in twenty once did.
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
			t.Fatalf("connection %d: %v", i, err)
		}
		if text, err := io.ReadAll(errs); err != nil || !strings.Contains(string(text), "port 22 was not asked for") {
			t.Fatalf("connection %d: told %q, %v", i, text, err)
		}
	}
}

// The WebSocket protocol: a pair of channels per port of the request, each beginning with the port's number.
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
		t.Errorf("data %q, error %q", got[0], got[1])
	}
}
