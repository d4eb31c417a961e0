package dataplane

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/grpc/codes"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"
)

// streamed is what the clients of connect-go speak in the tests of streams: gRPC itself and through connect-go.
var streamed = map[string][]connect.ClientOption{"grpc": {connect.WithGRPC()}, "connect": {}}

// TestStreamBackPressure: a client that does not read stops the component that sends.
func TestStreamBackPressure(t *testing.T) {
	var sent atomic.Int64
	ended := make(chan error, 1)
	s := startServer(t, invokerFunc(func(_ context.Context, _ *Method, c Call) error {
		if _, err := c.Receive(); err != nil {
			return err
		}
		message := make([]byte, 64<<10)
		_, _ = rand.Read(message) // compression must not make it small
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
				client := connect.NewClient[pb.StreamingOutputCallRequest, raw](c, c.base+testPath+"StreamingOutputCall", append(options, connect.WithCodec(rawCodec{}))...)
				stream, err := client.CallServerStream(ctx, connect.NewRequest(&pb.StreamingOutputCallRequest{}))
				if err != nil {
					t.Fatal(err)
				}
				// The sender stands still when what it has sent does not grow over a while.
				stalled := func() int64 {
					last := sent.Load()
					for {
						time.Sleep(100 * time.Millisecond) // the while
						if now := sent.Load(); now == last {
							return now
						} else if now > 64<<20 {
							t.Fatalf("%d bytes sent to a client that does not read", now)
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
					t.Errorf("the sender does not go on when its client reads: %d then %d bytes", before, after)
				}
				cancel() // a blocked sender learns of it
				select {
				case <-ended:
				case <-time.After(5 * time.Second):
					t.Error("the sender is blocked after its client has gone")
				}
			})
		}
	}
}

// raw takes any message as bytes.
type raw struct{ b []byte }

type rawCodec struct{ binaryCodec }

func (rawCodec) Unmarshal(b []byte, m any) error {
	m.(*raw).b = append(m.(*raw).b[:0], b...)
	return nil
}

// TestStreamCancel: a client's cancellation ends the component's context, and the component's end the client's stream.
func TestStreamCancel(t *testing.T) {
	entered, ended := make(chan struct{}, 1), make(chan error, 1)
	s := startServer(t, invokerFunc(func(ctx context.Context, m *Method, c Call) error {
		if m.Desc.Name() == "StreamingInputCall" { // ends while the client still sends
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
				both := connect.NewClient[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse](c, c.base+testPath+"FullDuplexCall", options...).CallBidiStream(ctx)
				if err := both.Send(&pb.StreamingOutputCallRequest{}); err != nil {
					t.Fatal(err)
				}
				<-entered
				cancel()
				select {
				case err := <-ended:
					if !errors.Is(err, context.Canceled) {
						t.Errorf("the component's context ended with %v", err)
					}
				case <-time.After(5 * time.Second):
					t.Fatal("the component does not learn that its client has gone")
				}
				up := connect.NewClient[pb.StreamingInputCallRequest, pb.StreamingInputCallResponse](c, c.base+testPath+"StreamingInputCall", options...).CallClientStream(t.Context())
				var err error
				for err == nil {
					err = up.Send(&pb.StreamingInputCallRequest{Payload: payload(1000)})
				}
				if !errors.Is(err, io.EOF) {
					t.Errorf("sending to a component that has ended: %v", err)
				}
				if _, err := up.CloseAndReceive(); connect.CodeOf(err) != connect.CodeAborted {
					t.Errorf("the component's end: %v", err)
				}
			})
		}
	}
}

// TestDeadline: a request ends at its deadline, in whatever the component waits.
func TestDeadline(t *testing.T) {
	ended := make(chan error, 1)
	s := startServer(t, invokerFunc(func(ctx context.Context, m *Method, c Call) (err error) {
		defer func() { ended <- err }()
		switch m.Desc.Name() {
		case "FullDuplexCall": // waits for a message that does not come
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
			// The header alone carries the deadline, so that it is the server that acts on it.
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
					if err != nil || method == "StreamingOutputCall" { // the one whose client does not read
						return
					}
					_, _ = io.Copy(io.Discard, response.Body)
					response.Body.Close()
					if got := response.Header.Get("Grpc-Status") + response.Trailer.Get("Grpc-Status"); got != "4" {
						t.Errorf("%s: grpc-status %q", method, got)
					}
				}()
				select {
				case err := <-ended:
					s, _ := errors.AsType[*Status](err)
					if !errors.Is(err, context.DeadlineExceeded) && (s == nil || s.Code != codes.DeadlineExceeded) {
						t.Errorf("%s: the component sees %v", method, err)
					}
					if took := time.Since(started); took < 150*time.Millisecond || took > 3*time.Second {
						t.Errorf("%s: ended after %v", method, took)
					}
				case <-time.After(5 * time.Second):
					t.Fatalf("%s: still waits", method)
				}
			}
		})
	}
}

// TestMaxTimeout: a client that asks for more, or for none, gets what the pod allows.
func TestMaxTimeout(t *testing.T) {
	s := startServer(t, &echo{}, func(o *GRPCOptions, _ *Config, _ *Material) { o.MaxTimeout = 100 * time.Millisecond })
	stream, err := s.dial(t, false).HalfDuplexCall(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("gRPC: %v", err)
	}
	c := s.httpClients(t)["h2c"]
	both := connect.NewClient[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse](c, c.base+testPath+"HalfDuplexCall").CallBidiStream(t.Context())
	if err := both.Send(nil); err != nil { // the header alone
		t.Fatal(err)
	}
	_, err = both.Receive()
	if connect.CodeOf(err) != connect.CodeDeadlineExceeded {
		t.Errorf("Connect: %v", err)
	}
}

func TestParseTimeout(t *testing.T) {
	for in, want := range map[string]time.Duration{
		"": -1, "1H": time.Hour, "5M": 5 * time.Minute, "30S": 30 * time.Second, "100m": 100 * time.Millisecond,
		"99999999u": 99999999 * time.Microsecond, "0n": 0, "99999999H": 1<<63 - 1,
	} {
		if got, err := parseTimeout(in); err != nil || got != want {
			t.Errorf("%q is %v, %v; want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"1", "S", "-1S", "1x", "123456789S", "1.5S", " 1S", "+1S"} {
		if got, err := parseTimeout(in); err == nil {
			t.Errorf("%q is %v", in, got)
		}
	}
}

// TestLimiter: over the limit requests wait for a while, and are then refused; health is not.
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
		t.Errorf("the second request: %v after %v", err, time.Since(started))
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
		t.Errorf("one more than may wait: %v after %v", err, time.Since(started))
	}
	close(e.hold)
	if err := <-first; err != nil {
		t.Error(err)
	}
	if err := <-waiting; err != nil && status.Code(err) != codes.ResourceExhausted {
		t.Error(err)
	}
}

// TestReceiveTimeout: a client that holds its message back loses its place.
func TestReceiveTimeout(t *testing.T) {
	s := startServer(t, &echo{}, func(o *GRPCOptions, _ *Config, _ *Material) {
		o.ReceiveTimeout, o.Limiter = 200*time.Millisecond, NewLimiter(1, time.Second)
	})
	for way, c := range s.httpClients(t) {
		body, w := io.Pipe()
		go w.Write([]byte{0, 0}) // and no more
		answered := make(chan string, 1)
		go func() {
			code, _ := post(t, c, "UnaryCall", nil, body)
			answered <- code
		}()
		select {
		case code := <-answered:
			if code != "4" {
				t.Errorf("%s: grpc-status %s", way, code)
			}
		case <-time.After(5 * time.Second):
			t.Fatalf("%s: still waits", way)
		}
		w.Close()
		if _, err := s.dial(t, false).UnaryCall(t.Context(), &pb.SimpleRequest{}); err != nil {
			t.Errorf("%s: others are not served: %v", way, err)
		}
	}
}
