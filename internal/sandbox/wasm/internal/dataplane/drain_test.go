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

// TestShutdownDrains: what is under way is answered, in streams too, and nothing new is let in.
func TestShutdownDrains(t *testing.T) {
	for _, way := range []string{"h3", "h2", "h2c"} {
		t.Run(way, func(t *testing.T) {
			e := &echo{hold: make(chan struct{}), entered: make(chan struct{}, 1)}
			s := startServer(t, e)
			c := s.httpClients(t)[way]
			unary := connect.NewClient[pb.SimpleRequest, pb.SimpleResponse](c, c.base+testPath+"UnaryCall", connect.WithGRPC())
			both := connect.NewClient[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse](c, c.base+testPath+"FullDuplexCall", connect.WithGRPC()).CallBidiStream(t.Context())
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
			eventually(t, "no connection is accepted any more", func() bool {
				conn, err := net.DialTimeout("tcp", s.CleartextAddress, time.Second)
				if err == nil {
					conn.Close()
				}
				return err != nil
			})
			if err := exchange(); err != nil {
				t.Errorf("the stream under way: %v", err)
			}
			select {
			case err := <-down:
				t.Fatalf("down while requests are under way: %v", err)
			case <-time.After(2 * linger):
			}
			close(e.hold)
			if err := <-answered; err != nil {
				t.Errorf("the request under way: %v", err)
			}
			if err := both.CloseRequest(); err != nil {
				t.Error(err)
			}
			if _, err := both.Receive(); !errors.Is(err, io.EOF) {
				t.Errorf("the stream's end: %v", err)
			}
			if err := <-down; err != nil {
				t.Errorf("shutdown: %v", err)
			}
		})
	}
}

// TestShutdownForces: at the end of its context a shutdown ends what is under way.
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
		both := connect.NewClient[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse](c, c.base+testPath+"FullDuplexCall", connect.WithGRPC()).CallBidiStream(t.Context())
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
		t.Errorf("shutdown: %v", err)
	}
	if took := time.Since(started); took > 3*time.Second {
		t.Errorf("it took %v", took)
	}
	for range 3 {
		select {
		case <-ended:
		case <-time.After(5 * time.Second):
			t.Fatal("a request does not learn of the end")
		}
	}
	if err := s.Shutdown(t.Context()); err != nil {
		t.Errorf("a second time: %v", err)
	}
}

// TestShutdownIdle: connections without requests hold a shutdown up for a moment only, and unused servers not at all.
func TestShutdownIdle(t *testing.T) {
	s := startServer(t, &echo{})
	s.get(t, s.clientTLS()) // something has been served
	for _, c := range s.httpClients(t) {
		response, err := c.Get(c.base + "/none")
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
	}
	started := time.Now()
	if err := s.Shutdown(t.Context()); err != nil || time.Since(started) > 2*time.Second {
		t.Errorf("%v after %v", err, time.Since(started))
	}
	started = time.Now()
	if err := startServer(t, &echo{}).Shutdown(t.Context()); err != nil || time.Since(started) > linger {
		t.Errorf("unused: %v after %v", err, time.Since(started))
	}
}

// TestServersLeaveNothing: no goroutine is left of servers that have gone.
func TestServersLeaveNothing(t *testing.T) {
	before := runtime.NumGoroutine()
	for i := range 10 {
		s := startServer(t, &echo{})
		if i%2 == 0 {
			s.served(t)
			s.served2(t)
		}
		if i%3 == 0 {
			s.Close()
		} else if err := s.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
		if _, err := net.Dial("tcp", s.TLSAddress); err == nil {
			t.Error("its port is open")
		}
		conn, err := net.ListenPacket("udp", s.QUICAddress)
		if err != nil {
			t.Errorf("its UDP port is taken: %v", err)
			continue
		}
		conn.Close()
	}
	deadline := time.Now().Add(10 * time.Second)
	for runtime.NumGoroutine() > before+2 {
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("%d goroutines more:\n%s", runtime.NumGoroutine()-before, stacks[:runtime.Stack(stacks, true)])
		}
		time.Sleep(5 * time.Millisecond) // pacing: nothing announces the end of goroutines
	}
}

func TestBadConfigurations(t *testing.T) {
	if _, err := NewServer(Config{}); !errdefs.IsInvalidArgument(err) {
		t.Error(err)
	}
	if _, err := NewGRPC(GRPCOptions{}); !errdefs.IsInvalidArgument(err) {
		t.Error(err)
	}
	twice := append(testMethods(), testMethods()[0])
	if _, err := NewGRPC(GRPCOptions{Methods: twice, Invoker: &echo{}}); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), twice[0].Procedure) {
		t.Error(err)
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
		t.Errorf("TLS without a certificate: %v", err)
	}
	sockets.TLS.Close()
	sockets.QUIC.Close()
	sockets.Cleartext.Close()
}
