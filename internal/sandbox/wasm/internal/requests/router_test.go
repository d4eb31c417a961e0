package requests

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/quic-go/quic-go/http3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

const (
	named = "example.com:foo.Bar@1.2.3"
	// testComponent serves grpc.testing.TestService, according to its name.
	testComponent = "example.com:grpc.testing.TestService@1.0.0"
	// page is the origin of the web page that can call the components.
	page = "https://app.example"
)

// node is the component map of a fake node, and the Invoker of all containers in its only worker.
type node struct {
	mu      sync.Mutex
	running map[string][]string
	dead    map[string]bool // containers whose worker cannot be reached
	socket  string
	// hold blocks unary calls to a container until it is closed; entered receives the container of a blocked call.
	hold    map[string]chan struct{}
	entered chan string
	ended   chan error // receives the context error of each broken stream
	seen    atomic.Pointer[http.Header]
}

func (n *node) All() map[string][]string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.running
}

func (n *node) Running(component string) []string { return n.All()[component] }

func (n *node) dial(ctx context.Context, container string) (net.Conn, error) {
	n.mu.Lock()
	dead := n.dead[container]
	n.mu.Unlock()
	if dead {
		return nil, errors.New("no such worker")
	}
	return (&net.Dialer{}).DialContext(ctx, "unix", n.socket)
}

// Invoke implements dataplane.Invoker for all containers of the worker.
func (n *node) Invoke(ctx context.Context, m *dataplane.Method, c dataplane.Call) error {
	header := c.RequestHeader().Clone()
	n.seen.Store(&header)
	container := header.Get(workerapi.HeaderContainer)
	_ = dataplane.SetMetadata(c.ResponseHeader(), "served-by", []byte(strings.ReplaceAll(container, "#", "_")))
	switch m.Desc.Name() {
	case "UnaryCall":
		if _, err := c.Receive(); err != nil {
			return err
		}
		n.mu.Lock()
		hold := n.hold[container]
		n.mu.Unlock()
		if hold != nil {
			n.entered <- container
			<-hold
		}
		b, _ := proto.Marshal(&pb.SimpleResponse{Username: container})
		return c.Send(b)
	case "FullDuplexCall":
		for {
			b, err := c.Receive()
			if err == io.EOF {
				_ = dataplane.SetMetadata(c.ResponseTrailer(), "at-end-bin", []byte{0, 255})
				return dataplane.Errorf(codes.DataLoss, "the end")
			}
			if err == nil {
				request := &pb.StreamingOutputCallRequest{}
				_ = proto.Unmarshal(b, request)
				b, _ = proto.Marshal(&pb.StreamingOutputCallResponse{Payload: request.Payload})
				err = c.Send(b)
			}
			if err != nil {
				n.ended <- ctx.Err()
				return err
			}
		}
	}
	return dataplane.Errorf(codes.Unimplemented, "not in this test")
}

// rig is a router on loopback with a fake node.
type rig struct {
	*node
	router                   *Router
	server                   *dataplane.Server
	tlsAddress, clearAddress string
	roots                    *x509.CertPool
}

func newRig(t *testing.T, change ...func(*Config)) *rig {
	t.Helper()
	n := &node{
		running: map[string][]string{}, dead: map[string]bool{}, hold: map[string]chan struct{}{},
		entered: make(chan string, 16), ended: make(chan error, 16), socket: filepath.Join(t.TempDir(), "data.sock"),
	}
	handler, err := dataplane.NewGRPC(dataplane.GRPCOptions{
		Methods: dataplane.Methods(pb.File_grpc_testing_test_proto.Services().ByName("TestService")), Invoker: n,
	})
	if err != nil {
		t.Fatal(err)
	}
	handler = dataplane.WithCORS(dataplane.CORS{Origins: []string{page}}, handler)
	worker, err := dataplane.NewServer(dataplane.Config{Handler: handler})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("unix", n.socket)
	if err != nil {
		t.Fatal(err)
	}
	if err := worker.Start(dataplane.Sockets{Cleartext: ln}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { worker.Close() })

	r := &rig{node: n, roots: x509.NewCertPool()}
	config := Config{Components: n, Dial: n.dial, Logger: slog.New(slog.DiscardHandler)}
	for _, f := range change {
		f(&config)
	}
	r.router = New(config)
	t.Cleanup(r.router.Close)
	material, err := dataplane.SelfSigned([]string{"localhost"}, []netip.Addr{netip.MustParseAddr("127.0.0.1")})
	if err != nil {
		t.Fatal(err)
	}
	r.roots.AppendCertsFromPEM(material.Certificate)
	identity, err := dataplane.NewTLS(material)
	if err != nil {
		t.Fatal(err)
	}
	r.tlsAddress, r.clearAddress = freeAddress(t), freeAddress(t)
	r.server, err = Serve(t.Context(), r.router,
		ServeConfig{Address: r.tlsAddress, Cleartext: r.clearAddress, TLS: identity, Logger: config.Logger})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.server.Close() })
	return r
}

// freeAddress returns a loopback address that is not in use.
func freeAddress(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

func (r *rig) run(component string, containers ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	next := map[string][]string{component: containers}
	for k, v := range r.running {
		if k != component {
			next[k] = v
		}
	}
	r.running = next
}

func (r *rig) client(t *testing.T, options ...grpc.DialOption) pb.TestServiceClient {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+r.clearAddress, append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return pb.NewTestServiceClient(conn)
}

// TestRouting checks that header, authority and path each select a container of the component, over every protocol.
func TestRouting(t *testing.T) {
	r := newRig(t)
	r.run(named, named+"#0")
	r.run(testComponent, testComponent+"#5")
	withHeader := metadata.AppendToOutgoingContext(t.Context(), "component", named)
	for name, test := range map[string]struct {
		ctx     context.Context
		options []grpc.DialOption
		want    string
	}{
		"header":    {withHeader, nil, named + "#0"},
		"authority": {t.Context(), []grpc.DialOption{grpc.WithAuthority(strings.ReplaceAll(named, "@", "%40"))}, named + "#0"},
		"path":      {t.Context(), nil, testComponent + "#5"},
		"header before authority": {withHeader, []grpc.DialOption{grpc.WithAuthority(strings.ReplaceAll(testComponent, "@", "%40"))},
			named + "#0"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := r.client(t, test.options...).UnaryCall(test.ctx, &pb.SimpleRequest{})
			if err != nil || got.Username != test.want {
				t.Errorf("container of UnaryCall = %q, %v; want %q", got.GetUsername(), err, test.want)
			}
			seen := *r.seen.Load()
			if peer := seen.Get(workerapi.HeaderPeer); !strings.HasPrefix(peer, "127.0.0.1:") {
				t.Errorf("client address at the worker = %q, want an address of 127.0.0.1", peer)
			}
			if seen.Get("Component") != "" || !strings.HasPrefix(seen.Get("X-Forwarded-For"), "127.0.0.1") {
				t.Errorf("request header at the component = %v", seen)
			}
		})
	}
	// A client cannot choose a container.
	got, err := r.client(t).UnaryCall(metadata.AppendToOutgoingContext(t.Context(), workerapi.HeaderContainer, named+"#0"),
		&pb.SimpleRequest{})
	if err != nil || got.Username != testComponent+"#5" {
		t.Errorf("container of a request with %s = %q, %v; want %q", workerapi.HeaderContainer, got.GetUsername(), err, testComponent+"#5")
	}
	h3 := &http3.Transport{TLSClientConfig: &tls.Config{RootCAs: r.roots}}
	defer h3.Close()
	client := connect.NewClient[pb.SimpleRequest, pb.SimpleResponse](&http.Client{Transport: h3},
		"https://"+r.tlsAddress+"/grpc.testing.TestService/UnaryCall", connect.WithGRPC())
	request := connect.NewRequest(&pb.SimpleRequest{})
	request.Header().Set("Component", named)
	response, err := client.CallUnary(t.Context(), request)
	if err != nil || response.Msg.Username != named+"#0" {
		t.Errorf("call over HTTP/3 = %v, %v", response, err)
	}
	testHTTP1(t, r)
}

// testHTTP1 sends a request whose Host names a component.
func testHTTP1(t *testing.T, r *rig) {
	t.Helper()
	conn, err := net.Dial("tcp", r.clearAddress)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "POST /grpc.testing.TestService/UnaryCall HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}", strings.ReplaceAll(named, "@", "%40"))
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if b, _ := io.ReadAll(response.Body); response.StatusCode != http.StatusOK || !strings.Contains(string(b), named+"#0") {
		t.Errorf("response over HTTP/1.1 = %s %s", response.Status, b)
	}
}

func TestRefusals(t *testing.T) {
	r := newRig(t)
	header := func(v string) context.Context { return metadata.AppendToOutgoingContext(t.Context(), "component", v) }
	client := r.client(t)
	check := func(what string, ctx context.Context, want codes.Code, text string) {
		t.Helper()
		_, err := client.UnaryCall(ctx, &pb.SimpleRequest{})
		if status.Code(err) != want || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: UnaryCall = %v, want %v with %q", what, err, want, text)
		}
	}
	check("no component serves the path", t.Context(), codes.Unimplemented, "no component on this node serves")
	check("no container runs", header(named), codes.Unavailable, named)
	r.run(testComponent, testComponent+"#0")
	r.run("example.com:grpc.testing.TestService@2.0.0", "example.com:grpc.testing.TestService@2.0.0#0")
	check("two versions serve the path", t.Context(), codes.FailedPrecondition, "grpc.testing.TestService@2.0.0")
	r.dead[testComponent+"#0"] = true
	check("the only container is not reached", header(testComponent), codes.Unavailable, "could not be reached")
	response, err := http.Get("http://" + r.clearAddress + "/nothing/here")
	if err != nil || response.StatusCode != http.StatusNotFound {
		t.Errorf("Get = %v, %v; want 404", response, err)
	}
	response.Body.Close()
}

// TestServicesFromDescriptors checks that a path selects a component by its services, whatever its name.
func TestServicesFromDescriptors(t *testing.T) {
	var asked atomic.Int64
	r := newRig(t, func(c *Config) {
		c.Services = func(container string) []string {
			asked.Add(1)
			if strings.HasPrefix(container, named) {
				return []string{"other.Service", "grpc.testing.TestService"}
			}
			return []string{"other.Service"}
		}
	})
	r.run(named, named+"#0")
	r.run("example.com:x@1.0.0", "x#0")
	for range 3 {
		if got, err := r.client(t).UnaryCall(t.Context(), &pb.SimpleRequest{}); err != nil || got.Username != named+"#0" {
			t.Fatalf("UnaryCall = %v, %v; want container %s", got, err, named+"#0")
		}
	}
	if n := asked.Load(); n > 2 {
		t.Errorf("Services was called %d times, want once for each of two containers", n)
	}
}

// TestLeastLoaded checks that a request goes to the container with the fewest requests in flight, and to equals in
// turn.
func TestLeastLoaded(t *testing.T) {
	r := newRig(t)
	ids := []string{testComponent + "#0", testComponent + "#1", testComponent + "#2"}
	r.run(testComponent, ids...)
	release := make(chan struct{})
	r.mu.Lock()
	for _, id := range ids {
		r.hold[id] = release
	}
	r.mu.Unlock()
	client := r.client(t)
	var wg sync.WaitGroup
	for range 2 * len(ids) {
		wg.Go(func() {
			if _, err := client.UnaryCall(t.Context(), &pb.SimpleRequest{}); err != nil {
				t.Error(err)
			}
		})
		// In sequence, because choosing a container and counting the request is not atomic.
		<-r.entered
	}
	for _, id := range ids {
		if n := r.router.load.of(id); n != 2 {
			t.Errorf("requests in flight to %s = %d, want 2", id, n)
		}
	}
	close(release)
	wg.Wait()
	for deadline := time.Now().Add(5 * time.Second); ; {
		left := 0
		r.router.load.counts.Range(func(any, any) bool { left++; return true })
		if left == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d containers still have a counter", left)
		}
		time.Sleep(time.Millisecond) // pacing: nothing reports the end of a body
	}
}

// TestRetry checks that a request that could not reach a container goes to another one, with its body.
func TestRetry(t *testing.T) {
	r := newRig(t)
	r.run(testComponent, testComponent+"#0", testComponent+"#1", testComponent+"#2")
	r.dead[testComponent+"#0"], r.dead[testComponent+"#2"] = true, true
	client := r.client(t)
	for range 6 {
		got, err := client.UnaryCall(t.Context(), &pb.SimpleRequest{Payload: &pb.Payload{Body: make([]byte, 100_000)}})
		if err != nil || got.Username != testComponent+"#1" {
			t.Fatalf("UnaryCall = %v, %v; want container %s", got, err, testComponent+"#1")
		}
	}
}

// TestStreams checks that messages are forwarded in both directions without delay, with the trailer, and that a
// cancellation reaches the component.
func TestStreams(t *testing.T) {
	r := newRig(t)
	r.run(testComponent, testComponent+"#0")
	both, err := r.client(t).FullDuplexCall(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i := range 5 {
		if err := both.Send(&pb.StreamingOutputCallRequest{Payload: &pb.Payload{Body: fmt.Append(nil, i)}}); err != nil {
			t.Fatal(err)
		}
		if m, err := both.Recv(); err != nil || string(m.Payload.Body) != fmt.Sprint(i) {
			t.Fatalf("message %d = %v, %v", i, m, err)
		}
	}
	if err := both.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if _, err := both.Recv(); status.Code(err) != codes.DataLoss || status.Convert(err).Message() != "the end" {
		t.Errorf("end of the stream = %v, want DataLoss", err)
	}
	if got := both.Trailer().Get("at-end-bin"); !slices.Equal(got, []string{"\x00\xff"}) {
		t.Errorf("trailer = %q", both.Trailer())
	}
	ctx, cancel := context.WithCancel(t.Context())
	if both, err = r.client(t).FullDuplexCall(ctx); err != nil {
		t.Fatal(err)
	}
	if err := both.Send(&pb.StreamingOutputCallRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := both.Recv(); err != nil {
		t.Fatal(err)
	}
	cancel()
	select {
	case err := <-r.ended:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("error of the component's context = %v, want Canceled", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("the cancellation did not reach the component within 5s")
	}
}

func BenchmarkResolve(b *testing.B) {
	n := &node{running: map[string][]string{}}
	for i := range 1000 {
		name := fmt.Sprintf("example.com:s%d@1.0.0", i)
		n.running[name] = []string{name + "#0"}
	}
	r := New(Config{Components: n})
	req, _ := http.NewRequest(http.MethodPost, "http://node/s500/M", nil)
	for b.Loop() {
		if _, err := r.resolve(req); err != nil {
			b.Fatal(err)
		}
	}
}
