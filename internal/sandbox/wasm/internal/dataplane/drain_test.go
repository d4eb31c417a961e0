package dataplane

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/containerd/errdefs"
	pb "google.golang.org/grpc/interop/grpc_testing"
)

// TestShutdownDrains checks that Shutdown completes the requests and streams in progress and accepts no new ones.
func TestShutdownDrains(t *testing.T) {
	for _, way := range []string{"h3", "h2", "h2c"} {
		t.Run(way, func(t *testing.T) {
			e := &echo{hold: make(chan struct{}), entered: make(chan struct{}, 1)}
			s := startServer(t, e)
			c := s.httpClients(t)[way]
			unary := connect.NewClient[pb.SimpleRequest, pb.SimpleResponse](c, c.base+testPath+"UnaryCall", connect.WithGRPC())
			both := connect.NewClient[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse](c, c.base+testPath+"FullDuplexCall",
				connect.WithGRPC()).CallBidiStream(t.Context())
			exchange := func() error {
				if err := both.Send(&pb.StreamingOutputCallRequest{Payload: payload(3)}); err != nil {
					return err
				}
				_, err := both.Receive()
				return err
			}
			if err := exchange(); err != nil {
				t.Fatal(err)
			}
			answered := make(chan error, 1)
			go func() {
				_, err := unary.CallUnary(t.Context(), connect.NewRequest(&pb.SimpleRequest{Payload: payload(100_000)}))
				answered <- err
			}()
			<-e.entered
			down := make(chan error, 1)
			go func() {
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				down <- s.Shutdown(ctx)
			}()
			eventually(t, "new connections are refused", func() bool {
				conn, err := net.DialTimeout("tcp", s.CleartextAddress, time.Second)
				if err == nil {
					conn.Close()
				}
				return err != nil
			})
			if err := exchange(); err != nil {
				t.Errorf("exchange on the open stream during Shutdown = %v", err)
			}
			select {
			case err := <-down:
				t.Fatalf("Shutdown = %v while requests are in progress", err)
			case <-time.After(2 * linger):
			}
			close(e.hold)
			if err := <-answered; err != nil {
				t.Errorf("request in progress during Shutdown = %v", err)
			}
			if err := both.CloseRequest(); err != nil {
				t.Error(err)
			}
			if _, err := both.Receive(); !errors.Is(err, io.EOF) {
				t.Errorf("end of the stream = %v, want EOF", err)
			}
			if err := <-down; err != nil {
				t.Errorf("Shutdown = %v", err)
			}
		})
	}
}

// TestShutdownForces checks that Shutdown aborts the requests in progress when its context ends.
func TestShutdownForces(t *testing.T) {
	ended := make(chan error, 3)
	s := startServer(t, invokerFunc(func(ctx context.Context, _ *Method, c Call) error {
		if _, err := c.Receive(); err != nil {
			return err
		}
		if err := c.Send(nil); err != nil {
			return err
		}
		<-ctx.Done()
		ended <- ctx.Err()
		return ctx.Err()
	}))
	for _, c := range s.httpClients(t) {
		both := connect.NewClient[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse](c, c.base+testPath+"FullDuplexCall",
			connect.WithGRPC()).CallBidiStream(t.Context())
		if err := both.Send(&pb.StreamingOutputCallRequest{}); err != nil {
			t.Fatal(err)
		}
		if _, err := both.Receive(); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	started := time.Now()
	if err := s.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Shutdown = %v, want DeadlineExceeded", err)
	}
	if took := time.Since(started); took > 3*time.Second {
		t.Errorf("Shutdown took %v with a timeout of 200ms", took)
	}
	for range 3 {
		select {
		case <-ended:
		case <-time.After(5 * time.Second):
			t.Fatal("the context of a request has not ended after 5s")
		}
	}
	if err := s.Shutdown(t.Context()); err != nil {
		t.Errorf("second Shutdown = %v", err)
	}
}

// TestShutdownIdle checks that Shutdown waits only briefly for idle connections, and does not wait in an unused server.
func TestShutdownIdle(t *testing.T) {
	s := startServer(t, &echo{})
	s.get(t, s.clientTLS()) // the server has been used
	for _, c := range s.httpClients(t) {
		response, err := c.Get(c.base + "/none")
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
	}
	started := time.Now()
	if err := s.Shutdown(t.Context()); err != nil || time.Since(started) > 2*time.Second {
		t.Errorf("Shutdown with idle connections = %v after %v", err, time.Since(started))
	}
	started = time.Now()
	if err := startServer(t, &echo{}).Shutdown(t.Context()); err != nil || time.Since(started) > linger {
		t.Errorf("Shutdown of an unused server = %v after %v", err, time.Since(started))
	}
}

// TestServersLeaveNothing checks that closed servers leave no goroutines and no open ports.
func TestServersLeaveNothing(t *testing.T) {
	before := runtime.NumGoroutine()
	for i := range 10 {
		s := startServer(t, &echo{})
		if i%2 == 0 {
			s.checkCall(t)
			s.checkGet(t)
		}
		if i%3 == 0 {
			s.Close()
		} else if err := s.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
		if _, err := net.Dial("tcp", s.TLSAddress); err == nil {
			t.Error("the TCP port of the closed server is open")
		}
		conn, err := net.ListenPacket("udp", s.QUICAddress)
		if err != nil {
			t.Errorf("listen on the UDP port of the closed server = %v", err)
			continue
		}
		conn.Close()
	}
	deadline := time.Now().Add(10 * time.Second)
	for runtime.NumGoroutine() > before+2 {
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("%d goroutines are left:\n%s", runtime.NumGoroutine()-before, stacks[:runtime.Stack(stacks, true)])
		}
		time.Sleep(5 * time.Millisecond) // pacing: no event reports the end of goroutines
	}
}

func TestBadConfigurations(t *testing.T) {
	if _, err := NewServer(Config{}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("NewServer without a handler = %v, want ErrInvalidArgument", err)
	}
	if _, err := NewGRPC(GRPCOptions{}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("NewGRPC without an invoker = %v, want ErrInvalidArgument", err)
	}
	twice := append(testMethods(), testMethods()[0])
	if _, err := NewGRPC(GRPCOptions{Methods: twice, Invoker: &echo{}}); !errdefs.IsInvalidArgument(err) ||
		!strings.Contains(err.Error(), twice[0].Procedure) {
		t.Errorf("NewGRPC with a duplicate method = %v, want ErrInvalidArgument for %s", err, twice[0].Procedure)
	}
	handler, err := NewGRPC(GRPCOptions{Invoker: &echo{}})
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewServer(Config{Handler: handler})
	if err != nil {
		t.Fatal(err)
	}
	sockets := listen(t)
	if err := s.Start(sockets); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Start with TLS sockets but no certificate = %v, want ErrInvalidArgument", err)
	}
	sockets.Close()
}
