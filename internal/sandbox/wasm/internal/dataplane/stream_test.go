package dataplane

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/grpc/codes"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"
)

// streamed holds the protocols of the stream tests: gRPC, which the package frames itself, and Connect.
var streamed = map[string][]connect.ClientOption{"grpc": {connect.WithGRPC()}, "connect": {}}

// TestStreamBackPressure checks that a component's Send blocks if the client does not read.
func TestStreamBackPressure(t *testing.T) {
	var sent atomic.Int64
	ended := make(chan error, 1)
	s := startServer(t, invokerFunc(func(_ context.Context, _ *Method, c Call) error {
		if _, err := c.Receive(); err != nil {
			return err
		}
		message := make([]byte, 64<<10)
		_, _ = rand.Read(message) // incompressible
		for {
			if err := c.Send(message); err != nil {
				ended <- err
				return err
			}
			sent.Add(int64(len(message)))
		}
	}))
	for way, c := range s.httpClients(t) {
		for name, options := range streamed {
			t.Run(way+"/"+name, func(t *testing.T) {
				sent.Store(0)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				client := connect.NewClient[pb.StreamingOutputCallRequest, raw](c, c.base+testPath+"StreamingOutputCall",
					append(options, connect.WithCodec(rawCodec{}))...)
				stream, err := client.CallServerStream(ctx, connect.NewRequest(&pb.StreamingOutputCallRequest{}))
				if err != nil {
					t.Fatal(err)
				}
				// stalled waits until the sender is blocked: it has sent nothing for 100 ms.
				stalled := func() int64 {
					last := sent.Load()
					for {
						time.Sleep(100 * time.Millisecond) // pacing: the interval of the comparison
						if now := sent.Load(); now == last {
							return now
						} else if now > 64<<20 {
							t.Fatalf("bytes sent to a client that does not read = %d, want at most 64 MiB", now)
						} else {
							last = now
						}
					}
				}
				before := stalled()
				for range 400 {
					if !stream.Receive() {
						t.Fatal(stream.Err())
					}
				}
				if after := stalled(); after <= before {
					t.Errorf("bytes sent after the client has read = %d, want more than %d", after, before)
				}
				cancel() // must end the blocked Send
				select {
				case <-ended:
				case <-time.After(5 * time.Second):
					t.Error("Send is still blocked 5s after the client was cancelled")
				}
			})
		}
	}
}

// raw is a message as bytes.
type raw struct{ b []byte }

type rawCodec struct{ binaryCodec }

func (rawCodec) Unmarshal(b []byte, m any) error {
	m.(*raw).b = append(m.(*raw).b[:0], b...)
	return nil
}

// TestStreamCancel checks that a client's cancellation ends the component's context, and that the return of Invoke ends
// the client's stream.
func TestStreamCancel(t *testing.T) {
	entered, ended := make(chan struct{}, 1), make(chan error, 1)
	s := startServer(t, invokerFunc(func(ctx context.Context, m *Method, c Call) error {
		if m.Desc.Name() == "StreamingInputCall" { // returns while the client still sends
			_, _ = c.Receive()
			return Errorf(codes.Aborted, "enough")
		}
		entered <- struct{}{}
		<-ctx.Done()
		ended <- ctx.Err()
		return ctx.Err()
	}))
	for way, c := range s.httpClients(t) {
		for name, options := range streamed {
			t.Run(way+"/"+name, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				both := connect.NewClient[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse](c, c.base+testPath+"FullDuplexCall",
					options...).CallBidiStream(ctx)
				if err := both.Send(&pb.StreamingOutputCallRequest{}); err != nil {
					t.Fatal(err)
				}
				<-entered
				cancel()
				select {
				case err := <-ended:
					if !errors.Is(err, context.Canceled) {
						t.Errorf("error of the component's context = %v, want Canceled", err)
					}
				case <-time.After(5 * time.Second):
					t.Fatal("the component's context has not ended 5s after the client was cancelled")
				}
				up := connect.NewClient[pb.StreamingInputCallRequest, pb.StreamingInputCallResponse](c, c.base+testPath+"StreamingInputCall",
					options...).CallClientStream(t.Context())
				var err error
				for err == nil {
					err = up.Send(&pb.StreamingInputCallRequest{Payload: payload(1000)})
				}
				if !errors.Is(err, io.EOF) {
					t.Errorf("Send after Invoke has returned = %v, want EOF", err)
				}
				if _, err := up.CloseAndReceive(); connect.CodeOf(err) != connect.CodeAborted {
					t.Errorf("CloseAndReceive = %v, want Aborted", err)
				}
			})
		}
	}
}

// TestDeadline checks that a request ends at its deadline, whether the component computes, receives or sends.
func TestDeadline(t *testing.T) {
	ended := make(chan error, 1)
	s := startServer(t, invokerFunc(func(ctx context.Context, m *Method, c Call) (err error) {
		defer func() { ended <- err }()
		switch m.Desc.Name() {
		case "FullDuplexCall": // waits for a message that is never sent
			for err == nil {
				_, err = c.Receive()
			}
			return err
		case "StreamingOutputCall": // sends to a client that does not read
			if _, err := c.Receive(); err != nil {
				return err
			}
			for err == nil {
				err = c.Send(make([]byte, 64<<10))
			}
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	}))
	for way, c := range s.httpClients(t) {
		t.Run(way, func(t *testing.T) {
			// Only the header has the deadline, so that the server must enforce it.
			for _, method := range []string{"UnaryCall", "FullDuplexCall", "StreamingOutputCall"} {
				body, w := io.Pipe()
				defer w.Close()
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.base+testPath+method, body)
				if err != nil {
					t.Fatal(err)
				}
				r.Header = http.Header{"Content-Type": {"application/grpc"}, "Te": {"trailers"}, "Grpc-Timeout": {"200m"}}
				go func() {
					w.Write([]byte{0, 0, 0, 0, 0})
					if method != "FullDuplexCall" {
						w.Close()
					}
				}()
				started := time.Now()
				go func() {
					response, err := c.Do(r)
					if err != nil || method == "StreamingOutputCall" { // this client does not read
						return
					}
					_, _ = io.Copy(io.Discard, response.Body)
					response.Body.Close()
					if got := response.Header.Get("Grpc-Status") + response.Trailer.Get("Grpc-Status"); got != "4" {
						t.Errorf("%s: grpc-status = %q, want 4", method, got)
					}
				}()
				select {
				case err := <-ended:
					s, _ := errors.AsType[*Status](err)
					if !errors.Is(err, context.DeadlineExceeded) && (s == nil || s.Code != codes.DeadlineExceeded) {
						t.Errorf("%s: error in the component = %v, want DeadlineExceeded", method, err)
					}
					if took := time.Since(started); took < 150*time.Millisecond || took > 3*time.Second {
						t.Errorf("%s: ended after %v, want about 200ms", method, took)
					}
				case <-time.After(5 * time.Second):
					t.Fatalf("%s: the component is still blocked after 5s", method)
				}
			}
		})
	}
}

// TestMaxTimeout checks that MaxTimeout applies to a request without a timeout.
func TestMaxTimeout(t *testing.T) {
	s := startServer(t, &echo{}, func(o *GRPCOptions, _ *Config, _ *Material) { o.MaxTimeout = 100 * time.Millisecond })
	stream, err := s.dial(t, false).HalfDuplexCall(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("gRPC call = %v, want DeadlineExceeded", err)
	}
	c := s.httpClients(t)["h2c"]
	both := connect.NewClient[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse](c,
		c.base+testPath+"HalfDuplexCall").CallBidiStream(t.Context())
	if err := both.Send(nil); err != nil { // sends only the header
		t.Fatal(err)
	}
	_, err = both.Receive()
	if connect.CodeOf(err) != connect.CodeDeadlineExceeded {
		t.Errorf("Connect call = %v, want DeadlineExceeded", err)
	}
}

func TestParseTimeout(t *testing.T) {
	for in, want := range map[string]time.Duration{
		"": -1, "1H": time.Hour, "5M": 5 * time.Minute, "30S": 30 * time.Second, "100m": 100 * time.Millisecond,
		"99999999u": 99999999 * time.Microsecond, "0n": 0, "99999999H": 1<<63 - 1,
	} {
		if got, err := parseTimeout(in); err != nil || got != want {
			t.Errorf("parseTimeout(%q) = %v, %v; want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"1", "S", "-1S", "1x", "123456789S", "1.5S", " 1S", "+1S"} {
		if got, err := parseTimeout(in); err == nil {
			t.Errorf("parseTimeout(%q) = %v, want an error", in, got)
		}
	}
}

// TestLimiter checks that requests over the limit wait for a limited time and are then refused, as are those over the
// queue's limit.
func TestLimiter(t *testing.T) {
	e := &echo{hold: make(chan struct{}), entered: make(chan struct{}, 1)}
	s := startServer(t, e, func(o *GRPCOptions, _ *Config, _ *Material) { o.Limiter = NewLimiter(1, 150*time.Millisecond) })
	client := s.dial(t, false)
	first := make(chan error, 1)
	go func() {
		_, err := client.UnaryCall(t.Context(), &pb.SimpleRequest{})
		first <- err
	}()
	<-e.entered
	started := time.Now()
	_, err := client.UnaryCall(t.Context(), &pb.SimpleRequest{})
	if status.Code(err) != codes.ResourceExhausted || time.Since(started) < 100*time.Millisecond {
		t.Errorf("second request = %v after %v, want ResourceExhausted after 150ms", err, time.Since(started))
	}
	waiting := make(chan error, 1)
	go func() {
		_, err := client.UnaryCall(t.Context(), &pb.SimpleRequest{})
		waiting <- err
	}()
	eventually(t, "a request waits", func() bool { return s.Stats().Requests == 2 })
	started = time.Now()
	_, err = client.UnaryCall(t.Context(), &pb.SimpleRequest{})
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("request over the queue's limit = %v after %v, want ResourceExhausted", err, time.Since(started))
	}
	close(e.hold)
	if err := <-first; err != nil {
		t.Error(err)
	}
	if err := <-waiting; err != nil && status.Code(err) != codes.ResourceExhausted {
		t.Error(err)
	}
}

// TestReceiveTimeout checks that a request whose message does not arrive is ended and frees its slot of the Limiter.
func TestReceiveTimeout(t *testing.T) {
	s := startServer(t, &echo{}, func(o *GRPCOptions, _ *Config, _ *Material) {
		o.ReceiveTimeout, o.Limiter = 200*time.Millisecond, NewLimiter(1, time.Second)
	})
	for way, c := range s.httpClients(t) {
		body, w := io.Pipe()
		go w.Write([]byte{0, 0}) // only a part of the prefix
		answered := make(chan string, 1)
		go func() {
			code, _ := post(t, c, "UnaryCall", nil, body)
			answered <- code
		}()
		select {
		case code := <-answered:
			if code != "4" {
				t.Errorf("%s: grpc-status = %s, want 4", way, code)
			}
		case <-time.After(5 * time.Second):
			t.Fatalf("%s: no response after 5s", way)
		}
		w.Close()
		if _, err := s.dial(t, false).UnaryCall(t.Context(), &pb.SimpleRequest{}); err != nil {
			t.Errorf("%s: next request = %v", way, err)
		}
	}
}

// TestStreamDeadline checks that the client's deadline ends a component's wait for the next message over all protocols.
func TestStreamDeadline(t *testing.T) {
	received := make(chan error, 1)
	s := startServer(t, invokerFunc(func(_ context.Context, _ *Method, c Call) error {
		_, err := c.Receive() // looks at no context, like a host function
		received <- err
		return err
	}))
	clients := s.httpClients(t)
	clients["http1"] = s.http1(t)
	for contentType, timeout := range map[string]string{
		"application/connect+proto": "Connect-Timeout-Ms: 300", "application/grpc-web+proto": "Grpc-Timeout: 300m",
		"application/grpc+proto": "Grpc-Timeout: 300m", "application/grpc+json": "Grpc-Timeout: 300m",
	} {
		for way, c := range clients {
			if way == "http1" && isGRPC(contentType) {
				continue // gRPC needs HTTP/2
			}
			for _, method := range []string{"FullDuplexCall", "StreamingInputCall"} {
				body, client := io.Pipe() // the client neither sends nor disconnects
				request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.base+testPath+method, body)
				if err != nil {
					t.Fatal(err)
				}
				request.Header.Set("Content-Type", contentType)
				name, value, _ := strings.Cut(timeout, ": ")
				request.Header.Set(name, value)
				answered := make(chan error, 1)
				go func() {
					response, err := c.Do(request)
					if err == nil {
						response.Body.Close()
					}
					answered <- err
				}()
				select {
				case err := <-received:
					if s, ok := errors.AsType[*Status](err); !ok || s.Code != codes.DeadlineExceeded {
						t.Errorf("Receive of %s of %s over %s = %v; want DEADLINE_EXCEEDED", method, contentType, way, err)
					}
				case <-time.After(10 * time.Second):
					t.Errorf("Receive of %s of %s over %s goes on after the deadline", method, contentType, way)
				}
				client.Close()
				if err := <-answered; err != nil {
					t.Errorf("answer of %s of %s over %s = %v", method, contentType, way, err)
				}
			}
		}
	}
}
