package dataplane

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	pb "google.golang.org/grpc/interop/grpc_testing"
)

// TestHalfDuplex calls streaming methods over HTTP/1.1 with connect-go: it sends all requests before it reads.
func TestHalfDuplex(t *testing.T) {
	s := startServer(t, &echo{})
	c := s.http1(t)
	payload := &pb.Payload{Body: bytes.Repeat([]byte("x"), 100_000)} // more than net/http's and the kernel's buffers hold
	const n = 20
	for name, options := range map[string][]connect.ClientOption{"connect": nil, "connect JSON": {connect.WithProtoJSON()}, "gRPC-Web": {connect.WithGRPCWeb()}} {
		t.Run(name, func(t *testing.T) {
			up := connect.NewClient[pb.StreamingInputCallRequest, pb.StreamingInputCallResponse](c, c.base+testPath+"StreamingInputCall", options...).CallClientStream(t.Context())
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
			down, err := connect.NewClient[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse](c, c.base+testPath+"StreamingOutputCall", options...).CallServerStream(t.Context(), connect.NewRequest(request))
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
			head := "POST " + testPath + "FullDuplexCall HTTP/1.1\r\nHost: a\r\nOrigin: https://a.example\r\n" + field + "\r\nContent-Length: 1000\r\n\r\n"
			if _, err := conn.Write(append([]byte(head), webFrame(t, &pb.StreamingOutputCallRequest{})...)); err != nil {
				t.Fatal(err)
			}
			started := time.Now()
			answer, err := io.ReadAll(conn) // ends when the server closes the connection
			if got := string(answer); err != nil || !strings.HasPrefix(got, "HTTP/1.1 505") || !strings.Contains(got, "HTTP/3") || !strings.Contains(got, "Access-Control-Allow-Origin: *") {
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
		_, body := s.http1(t).send(t, http.MethodPost, testPath+"FullDuplexCall", strings.Repeat(string(message), n), "Content-Type: application/connect+proto")
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
	head := "POST " + testPath + "FullDuplexCall HTTP/1.1\r\nHost: a\r\nContent-Type: application/connect+proto\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n\x00\x00\x00\x00\x00\r\n"
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
