package dataplane

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/semaphore"
	"google.golang.org/grpc/codes"
	pb "google.golang.org/grpc/interop/grpc_testing"
)

// TestHalfDuplex calls streaming methods over HTTP/1.1 with connect-go: it sends all requests before it reads.
func TestHalfDuplex(t *testing.T) {
	s := startServer(t, &echo{})
	c := s.http1(t)
	payload := &pb.Payload{Body: bytes.Repeat([]byte("x"), 100_000)} // more than net/http's and the kernel's buffers hold
	const n = 20
	for name, options := range map[string][]connect.ClientOption{"connect": nil, "connect JSON": {connect.WithProtoJSON()},
		"gRPC-Web": {connect.WithGRPCWeb()}} {
		t.Run(name, func(t *testing.T) {
			up := connect.NewClient[pb.StreamingInputCallRequest, pb.StreamingInputCallResponse](c, c.base+testPath+"StreamingInputCall",
				options...).CallClientStream(t.Context())
			for range n {
				if err := up.Send(&pb.StreamingInputCallRequest{Payload: payload}); err != nil {
					t.Fatal(err)
				}
			}
			reply, err := up.CloseAndReceive()
			if err != nil || reply.Msg.AggregatedPayloadSize != n*int32(len(payload.Body)) {
				t.Errorf("client stream = %v, %v", reply, err)
			}
			request := &pb.StreamingOutputCallRequest{Payload: payload}
			for range n {
				request.ResponseParameters = append(request.ResponseParameters, &pb.ResponseParameters{Size: 100_000})
			}
			down, err := connect.NewClient[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse](c, c.base+testPath+"StreamingOutputCall",
				options...).CallServerStream(t.Context(), connect.NewRequest(request))
			if err != nil {
				t.Fatal(err)
			}
			got := 0
			for down.Receive() {
				got++
			}
			if down.Err() != nil || got != n || down.ResponseTrailer().Get("X-Count") != "done" {
				t.Errorf("server stream = %d messages, %v, %v", got, down.Err(), down.ResponseTrailer())
			}
			// The component replies to each message at once, before the client has sent the next one.
			var body bytes.Buffer
			for range n {
				body.Write(webFrame(t, &pb.StreamingOutputCallRequest{Payload: payload}))
			}
			contentType := "application/connect+proto"
			if name == "gRPC-Web" {
				contentType = "application/grpc-web+proto"
			}
			slow := io.MultiReader(io.LimitReader(&body, 200_000), pausing{t}, &body)
			response, err := c.Post(c.base+testPath+"FullDuplexCall", contentType, slow)
			if err != nil {
				t.Fatal(err)
			}
			defer response.Body.Close()
			b, err := io.ReadAll(response.Body)
			if err != nil || response.StatusCode != http.StatusOK || len(b) < n*len(payload.Body) {
				t.Errorf("bidirectional stream = %s, %d bytes, %v; want %d messages", response.Status, len(b), err, n)
			}
		})
	}
}

// pausing waits once, and has no data.
type pausing struct{ t *testing.T }

func (p pausing) Read([]byte) (int, error) {
	time.Sleep(100 * time.Millisecond) // pacing: the component's first replies are ready before the request ends
	return 0, io.EOF
}

// TestHalfDuplexEndless checks that a client that expects full duplex gets an error soon, and that its connection is
// closed.
func TestHalfDuplexEndless(t *testing.T) {
	const wait = 300 * time.Millisecond
	invokers := map[string]Invoker{
		"answers first": invokerFunc(func(_ context.Context, _ *Method, c Call) error { return c.Send(nil) }),
		"echoes":        &echo{},
		"reads beside": invokerFunc(func(_ context.Context, _ *Method, c Call) error {
			read := make(chan error, 1)
			go func() {
				for {
					if _, err := c.Receive(); err != nil {
						read <- err
						return
					}
				}
			}()
			err := c.Send(nil)
			<-read
			return err
		}),
	}
	for name, invoker := range invokers {
		for field, receiveTimeout := range map[string]time.Duration{
			"Content-Type: application/connect+proto":                               wait,
			"Content-Type: application/connect+proto\r\nConnect-Timeout-Ms: 300":    time.Hour,
			"Content-Type: application/grpc-web+proto\r\nGrpc-Timeout: 300m":        time.Hour,
			"Content-Type: application/grpc-web+proto\r\nConnect-Timeout-Ms: never": wait,
		} {
			s := startServer(t, invoker, func(o *GRPCOptions, c *Config, _ *Material) {
				o.ReceiveTimeout = receiveTimeout
				c.Handler = WithCORS(CORS{Origins: []string{"*"}}, newGRPC(t)(*o))
			})
			conn, err := net.Dial("tcp", s.CleartextAddress)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
			head := "POST " + testPath + "FullDuplexCall HTTP/1.1\r\nHost: a\r\nOrigin: https://a.example\r\n" + field +
				"\r\nContent-Length: 1000\r\n\r\n"
			started := time.Now()
			if _, err := conn.Write(append([]byte(head), webFrame(t, &pb.StreamingOutputCallRequest{})...)); err != nil {
				t.Fatal(err)
			}
			answer, err := io.ReadAll(conn) // ends when the server closes the connection
			if got := string(answer); err != nil || !strings.HasPrefix(got, "HTTP/1.1 505") || !strings.Contains(got, "HTTP/3") ||
				!strings.Contains(got, "Access-Control-Allow-Origin: *") {
				t.Errorf("answer of a component that %s to %q = %q, %v; want 505", name, field, answer, err)
			}
			if elapsed := time.Since(started); elapsed < wait || elapsed > 20*wait {
				t.Errorf("answer of a component that %s to %q took %s, want about %s", name, field, elapsed, wait)
			}
		}
	}
}

// TestHalfDuplexLimit checks that the server keeps a limited part of a request in memory, and that the client can send
// the whole request before it reads.
func TestHalfDuplexLimit(t *testing.T) {
	received := make(chan error, 1)
	s := startServer(t, invokerFunc(func(_ context.Context, _ *Method, c Call) error {
		if err := c.Send(nil); err != nil {
			return err
		}
		for {
			_, err := c.Receive()
			if err == nil {
				continue
			}
			received <- err
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
	}), func(o *GRPCOptions, _ *Config, _ *Material) { o.MaxMessageBytes = 10_000 })
	message := webFrame(t, &pb.StreamingOutputCallRequest{Payload: &pb.Payload{Body: make([]byte, 1000)}})
	for n, code := range map[int]string{9: "", 10_000: "resource_exhausted"} {
		_, body := s.http1(t).send(t, http.MethodPost, testPath+"FullDuplexCall", strings.Repeat(string(message), n),
			"Content-Type: application/connect+proto")
		if !strings.Contains(body, code) || code == "" && strings.Contains(body, "error") {
			t.Errorf("answer to %d messages = %q, want %q", n, body, code)
		}
		if err := <-received; errors.Is(err, io.EOF) != (code == "") {
			t.Errorf("Receive of %d messages = %v, want %q", n, err, code)
		}
	}
}

// TestHalfDuplexCut checks that a component does not take the requests of a client that disconnects for complete ones.
func TestHalfDuplexCut(t *testing.T) {
	got := make(chan error, 1)
	s := startServer(t, invokerFunc(func(_ context.Context, _ *Method, c Call) error {
		_ = c.Send(nil) // reads ahead
		for {
			if _, err := c.Receive(); err != nil {
				got <- err
				return err
			}
		}
	}))
	conn, err := net.Dial("tcp", s.CleartextAddress)
	if err != nil {
		t.Fatal(err)
	}
	head := "POST " + testPath +
		"FullDuplexCall HTTP/1.1\r\nHost: a\r\nContent-Type: application/connect+proto\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n\x00\x00\x00\x00\x00\r\n"
	if _, err := io.WriteString(conn, head); err != nil {
		t.Fatal(err)
	}
	conn.Close()
	select {
	case err := <-got:
		if err == io.EOF {
			t.Error("Receive after the client has disconnected = EOF, want an error")
		}
	case <-time.After(10 * time.Second):
		t.Error("Receive does not return")
	}
}

// begin sends a stream of Connect over HTTP/1.1 that announces size bytes after its header and sends all but the last
// one. It returns the connection.
func (s *testServer) begin(t *testing.T, size int) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", s.CleartextAddress)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	head := fmt.Sprintf("POST %sFullDuplexCall HTTP/1.1\r\nHost: a\r\nContent-Type: application/connect+proto\r\nContent-Length: %d\r\n\r\n",
		testPath, size)
	if _, err := conn.Write(append([]byte(head), make([]byte, size-1)...)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// countedMemory counts what is taken.
type countedMemory struct {
	*semaphore.Weighted
	used, most atomic.Int64
}

func (m *countedMemory) TryAcquire(n int64) bool {
	if !m.Weighted.TryAcquire(n) {
		return false
	}
	used := m.used.Add(n)
	for most := m.most.Load(); used > most && !m.most.CompareAndSwap(most, used); most = m.most.Load() {
	}
	return true
}

func (m *countedMemory) Release(n int64) {
	m.used.Add(-n)
	m.Weighted.Release(n)
}

// TestHalfDuplexUnread checks that the server keeps nothing of a request that nobody reads any more: the component has
// returned, or the request was refused.
func TestHalfDuplexUnread(t *testing.T) {
	const n, size = 8, 2 << 20
	hold := make(chan struct{})
	defer close(hold)
	denied := invokerFunc(func(context.Context, *Method, Call) error { return Errorf(codes.PermissionDenied, "no") })
	busy := NewLimiter(1, time.Millisecond)
	if busy.acquire(t.Context()) != nil {
		t.Fatal("no slot")
	}
	for want, limiter := range map[string]*Limiter{"permission_denied": NewLimiter(1, time.Minute), "resource_exhausted": busy} {
		memory := &countedMemory{Weighted: semaphore.NewWeighted(AheadMemory)}
		s := startServer(t, denied, func(o *GRPCOptions, _ *Config, _ *Material) { o.Limiter, o.Ahead = limiter, memory })
		before := heap()
		conns := make([]net.Conn, n)
		for i := range conns {
			conns[i] = s.begin(t, size) // returns when the server has read most of it
		}
		if grown := int64(heap()) - int64(before); grown > size || memory.most.Load() > 0 {
			t.Errorf("%s: heap grew by %d bytes for %d clients, and %d bytes were charged", want, grown, n, memory.most.Load())
		}
		for _, conn := range conns {
			if _, err := conn.Write([]byte{0}); err != nil {
				t.Fatal(err)
			}
			response, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Fatal(err)
			}
			b, err := io.ReadAll(response.Body)
			response.Body.Close()
			if err != nil || !strings.Contains(string(b), want) {
				t.Errorf("answer = %s %q, %v; want %s", response.Status, b, err, want)
			}
		}
	}
}

// TestHalfDuplexMemory checks that all requests share the memory for what they left when their responses began, that it
// is given back, and that a request beyond it fails with RESOURCE_EXHAUSTED.
func TestHalfDuplexMemory(t *testing.T) {
	const n, size, most = 6, 1 << 20, 2 << 20
	memory := &countedMemory{Weighted: semaphore.NewWeighted(most)}
	received := make(chan error, n)
	s := startServer(t, invokerFunc(func(_ context.Context, _ *Method, c Call) error {
		err := c.Send(nil)
		for err == nil {
			_, err = c.Receive()
		}
		received <- err
		if err == io.EOF {
			return nil
		}
		return err
	}), func(o *GRPCOptions, _ *Config, _ *Material) { o.Ahead = memory })
	conns := make([]net.Conn, n)
	for i := range conns {
		conns[i] = s.begin(t, size/5*5)
	}
	for _, conn := range conns {
		if _, err := conn.Write([]byte{0}); err != nil {
			t.Fatal(err)
		}
	}
	exhausted := 0
	for range n {
		if err := <-received; err != io.EOF {
			exhausted++
			if s, ok := errors.AsType[*Status](err); !ok || s.Code != codes.ResourceExhausted || !strings.Contains(s.Message, "memory") {
				t.Errorf("Receive = %v, want RESOURCE_EXHAUSTED", err)
			}
		}
	}
	if exhausted == 0 || exhausted > n-1 || memory.most.Load() > most {
		t.Errorf("%d of %d requests found no memory; %d bytes were taken, want at most %d", exhausted, n, memory.most.Load(), most)
	}
	eventually(t, "all memory is given back", func() bool { return memory.used.Load() == 0 })
}

// TestHalfDuplexInterrupt checks that a component's status reaches a client that still sends, although the component has
// interrupted its own read. The connection ends, because net/http has cancelled its context.
func TestHalfDuplexInterrupt(t *testing.T) {
	const size = 1 << 20 // bytes, of messages without content
	returned := make(chan struct{})
	s := startServer(t, invokerFunc(func(_ context.Context, _ *Method, c Call) error {
		defer close(returned)
		complete, read := make(chan struct{}), make(chan error, 1)
		go func() {
			var err error
			for n := 0; err == nil; n++ {
				if n == size/5 {
					close(complete) // and the next Receive waits for the last byte
				}
				_, err = c.Receive()
			}
			read <- err
		}()
		<-complete
		c.Interrupt()
		if err := <-read; err == io.EOF {
			t.Error("Receive = EOF, want an error")
		}
		return Errorf(codes.PermissionDenied, "no")
	}))
	conn := s.begin(t, size)
	<-returned
	if _, err := conn.Write([]byte{0}); err != nil {
		t.Fatal(err)
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	b, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK || !strings.Contains(string(b), "permission_denied") || !response.Close {
		t.Errorf("answer = %s %v %q, %v; want the component's status and the end of the connection", response.Status, response.Header, b, err)
	}
}
