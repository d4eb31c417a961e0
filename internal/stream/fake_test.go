package stream_test

import (
	"cmp"
	"context"
	"io"
	"log/slog"
	"net"
	"net/url"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/stream"
)

// fakeRuntime is a Runtime that calls its functions. A test sets only the functions that it needs.
type fakeRuntime struct {
	exec    func(ctx context.Context, id string, req sandbox.ExecRequest) (int32, error)
	attach  func(ctx context.Context, id string, req sandbox.AttachRequest) error
	forward func(ctx context.Context, id string, port int32, s io.ReadWriteCloser) error
}

func (f fakeRuntime) Exec(ctx context.Context, id string, req sandbox.ExecRequest) (int32, error) {
	if f.exec == nil {
		return 0, errdefs.ErrNotImplemented
	}
	return f.exec(ctx, id, req)
}

func (f fakeRuntime) Attach(ctx context.Context, id string, req sandbox.AttachRequest) error {
	if f.attach == nil {
		return errdefs.ErrNotImplemented
	}
	return f.attach(ctx, id, req)
}

func (f fakeRuntime) PortForward(ctx context.Context, id string, port int32, s io.ReadWriteCloser) error {
	if f.forward == nil {
		return errdefs.ErrNotImplemented
	}
	return f.forward(ctx, id, port, s)
}

// serve runs a server until the test ends, and then checks that Serve returns nil.
func serve(t *testing.T, config stream.Config) *stream.Server {
	t.Helper()
	config.Logger = cmp.Or(config.Logger, slog.New(slog.DiscardHandler))
	s, err := stream.New(config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Serve = %v, want nil", err)
		}
	})
	return s
}

// protocols maps the names of the clients' protocols to functions that make a client for a URL.
var protocols = map[string]func(url string) (remotecommand.Executor, error){
	"SPDY": func(u string) (remotecommand.Executor, error) {
		parsed, err := url.Parse(u)
		if err != nil {
			return nil, err
		}
		return remotecommand.NewSPDYExecutor(&rest.Config{}, "POST", parsed)
	},
	"WebSocket v4": func(u string) (remotecommand.Executor, error) {
		return remotecommand.NewWebSocketExecutorForProtocols(&rest.Config{}, "GET", u, "v4.channel.k8s.io")
	},
	"WebSocket v5": func(u string) (remotecommand.Executor, error) {
		return remotecommand.NewWebSocketExecutor(&rest.Config{}, "GET", u)
	},
}

// canCloseStdin reports whether a client can close stdin in a protocol.
func canCloseStdin(protocol string) bool { return protocol != "WebSocket v4" }

// relay forwards connections from clients to a server, and can cut them off.
type relay struct {
	listener net.Listener
	target   string
	mu       sync.Mutex
	conns    []*net.TCPConn
	wg       sync.WaitGroup
}

func newRelay(t *testing.T, target string) *relay {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{listener: listener, target: target}
	r.wg.Go(r.accept)
	t.Cleanup(func() {
		listener.Close()
		r.cut(false)
		r.wg.Wait()
	})
	return r
}

func (r *relay) accept() {
	for {
		client, err := r.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", r.target)
		if err != nil {
			client.Close()
			continue
		}
		r.mu.Lock()
		r.conns = append(r.conns, client.(*net.TCPConn), server.(*net.TCPConn))
		r.mu.Unlock()
		r.wg.Go(func() { pass(client, server) })
		r.wg.Go(func() { pass(server, client) })
	}
}

// pass copies without splice(2), because the standard library keeps splice's pipes open for a while.
func pass(to, from net.Conn) {
	io.Copy(struct{ io.Writer }{to}, struct{ io.Reader }{from})
	to.Close()
	from.Close()
}

// through returns a URL that reaches the server's URL through the relay.
func (r *relay) through(t *testing.T, u string) string {
	t.Helper()
	if !strings.Contains(u, r.target) {
		t.Fatalf("URL %s does not contain the server's address %s", u, r.target)
	}
	return strings.Replace(u, r.target, r.listener.Addr().String(), 1)
}

// cut closes all connections, by a reset if reset is set.
func (r *relay) cut(reset bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, conn := range r.conns {
		if reset {
			conn.SetLinger(0)
		}
		conn.Close()
	}
	r.conns = nil
}

// usage is the number of goroutines and open descriptors of the process.
type usage struct{ goroutines, fds int }

func use(t *testing.T) usage {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return usage{runtime.NumGoroutine(), len(fds)}
}

// backTo waits until the process has no more goroutines and descriptors than before. It fails the test after 30 s.
func backTo(t *testing.T, before usage) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		now := use(t)
		if now.goroutines <= before.goroutines && now.fds <= before.fds {
			return
		}
		if time.Now().After(deadline) {
			stacks := make([]byte, 1<<20)
			stacks = stacks[:runtime.Stack(stacks, true)]
			t.Fatalf("usage = %+v, want at most %+v\n%.20000s", now, before, stacks)
		}
		time.Sleep(20 * time.Millisecond) // pacing: nothing signals the end of a goroutine
	}
}
