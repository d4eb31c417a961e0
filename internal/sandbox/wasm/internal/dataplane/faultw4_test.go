package dataplane

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	pb "google.golang.org/grpc/interop/grpc_testing"

	"github.com/tripod-run/tripod/internal/connlimit"
)

// heap returns the size of the live heap and the stacks.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}

// checkCall checks that a call over a new HTTP/3 connection is served.
func (s *testServer) checkCall(t testing.TB) {
	t.Helper()
	transport := &http3.Transport{TLSClientConfig: s.clientTLS()}
	defer transport.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	client := connect.NewClient[pb.SimpleRequest, pb.SimpleResponse](&http.Client{Transport: transport},
		"https://"+s.QUICAddress+testPath+"UnaryCall", connect.WithGRPC())
	if _, err := client.CallUnary(ctx, connect.NewRequest(&pb.SimpleRequest{Payload: payload(10)})); err != nil {
		t.Errorf("call over a new connection = %v", err)
	}
}

func loopbackUDP(t testing.TB) *net.UDPConn {
	t.Helper()
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// deaf is a socket that discards what it receives, so that its handshakes never complete.
type deaf struct{ *net.UDPConn }

func (d deaf) ReadFrom(p []byte) (int, net.Addr, error) {
	for {
		if _, _, err := d.UDPConn.ReadFrom(p); err != nil {
			return 0, nil, err
		}
	}
}

// SyscallConn hides the socket's method. Otherwise quic-go would bypass ReadFrom.
func (d deaf) SyscallConn() {}

// TestFaultW4_HandshakeFlood checks that a flood of incomplete handshakes gets state for only a few, because further
// clients must prove their address, that real clients are still served, and that no state is left afterwards.
func TestFaultW4_HandshakeFlood(t *testing.T) {
	s := startServer(t, &echo{})
	s.checkCall(t)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	c := s.clientTLS()
	c.NextProtos, c.ServerName = []string{http3.NextProtoH3}, "localhost"
	server, err := net.ResolveUDPAddr("udp", s.QUICAddress)
	if err != nil {
		t.Fatal(err)
	}
	for range 300 {
		conn := loopbackUDP(t)
		wg.Go(func() {
			transport := &quic.Transport{Conn: deaf{conn}}
			defer transport.Close()
			_, err := transport.Dial(ctx, server, c, &quic.Config{HandshakeIdleTimeout: time.Minute})
			if err == nil {
				t.Error("a deaf client is connected")
			}
		})
	}
	eventually(t, "the flood has reached the limit", func() bool { return s.quic.handshakes.Load() >= handshakesUnverified })
	for range 5 {
		s.checkCall(t)
		if n := s.quic.handshakes.Load(); n > handshakesUnverified+1 {
			t.Errorf("handshakes with state = %d, want at most %d", n, handshakesUnverified+1)
		}
	}
	cancel()
	wg.Wait()
	deadline := time.Now().Add(30 * time.Second)
	for s.quic.handshakes.Load() > 0 || s.Stats().QUICConnections > 0 {
		if time.Now().After(deadline) {
			t.Fatalf("%d handshakes and %d connections are left", s.quic.handshakes.Load(), s.Stats().QUICConnections)
		}
		time.Sleep(50 * time.Millisecond) // pacing: quic-go's timers end the handshakes
	}
	if !strings.Contains(s.log.String(), "QUIC handshake failed") {
		t.Error("no failed handshake is logged")
	}
	if lines := strings.Count(s.log.String(), "QUIC handshake failed"); lines > 150 {
		t.Errorf("log lines about failed handshakes = %d, want at most 150", lines)
	}
}

// TestFaultW4_IdleConnections checks that TCP and QUIC connections are limited and use little memory, and that a flood
// of idle connections affects neither active connections nor new ones.
func TestFaultW4_IdleConnections(t *testing.T) {
	const limit, tried = 100, 130
	s := startServer(t, &echo{}, func(_ *GRPCOptions, c *Config, _ *Material) { c.Connections.Max = limit })
	first := s.httpClients(t)["h3"]
	call := func() error {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, first.base+"/none", nil)
		if err != nil {
			return err
		}
		response, err := first.Do(r)
		if err == nil {
			response.Body.Close()
		}
		return err
	}
	if err := call(); err != nil {
		t.Fatal(err)
	}
	before := heap()
	c := s.clientTLS()
	c.NextProtos, c.ServerName = []string{http3.NextProtoH3}, "localhost"
	server, err := net.ResolveUDPAddr("udp", s.QUICAddress)
	if err != nil {
		t.Fatal(err)
	}
	transport := &quic.Transport{Conn: loopbackUDP(t)}
	defer transport.Close()
	for range tried {
		if _, err := transport.Dial(t.Context(), server, c, nil); err != nil {
			t.Fatal(err)
		}
		if n := s.Stats().QUICConnections; n > limit {
			t.Fatalf("open connections = %d, want at most %d", n, limit)
		}
	}
	// Client and server are in this process, so half of the memory is the client's.
	t.Logf("%d KiB per idle QUIC connection, client and server together", (heap()-before)/limit/1024)
	if each := (heap() - before) / limit; each > 400<<10 {
		t.Errorf("memory of an idle connection = %d bytes, want at most 400 KiB", each)
	}
	if err := call(); err != nil {
		t.Errorf("request over the active connection = %v", err)
	}
	if _, err := s.udp.Admit(nil, nil); err != nil {
		t.Errorf("Admit of a new connection = %v", err)
	}
	if n := s.Stats().Rejected[connlimit.ReasonDisplaced]; n < tried-limit {
		t.Errorf("displaced connections = %d, want at least %d", n, tried-limit)
	}
	var tcp []net.Conn
	defer func() {
		for _, conn := range tcp {
			conn.Close()
		}
	}()
	for range tried {
		conn, err := net.Dial("tcp", s.CleartextAddress)
		if err != nil {
			t.Fatal(err)
		}
		tcp = append(tcp, conn)
	}
	closed := func() bool {
		n := 0
		for _, conn := range tcp {
			_ = conn.SetReadDeadline(time.Now().Add(time.Millisecond))
			var b [1]byte
			if _, err := conn.Read(b[:]); err != nil && !isTimeout(err) {
				n++
			}
		}
		return n == tried-limit
	}
	eventually(t, "the oldest connections are closed", closed)
	last := tcp[tried-1]
	fmt.Fprintf(last, "GET /none HTTP/1.1\r\nHost: x\r\n\r\n")
	_ = last.SetReadDeadline(time.Now().Add(5 * time.Second))
	var b [12]byte
	if _, err := io.ReadFull(last, b[:]); err != nil || string(b[:]) != "HTTP/1.1 404" {
		t.Errorf("response on the newest connection = %q, %v; want 404", b, err)
	}
	if !strings.Contains(s.log.String(), "connections were rejected") {
		t.Error("the rejected connections are not logged")
	}
}

// TestFaultW4_HeaderBomb checks that headers over the limit, of one long field or of many, are refused and freed.
func TestFaultW4_HeaderBomb(t *testing.T) {
	var reached atomic.Int64
	s := startServer(t, invokerFunc(func(_ context.Context, _ *Method, c Call) error {
		reached.Add(1)
		return Errorf(0, "reached")
	}))
	s.checkGet(t)
	before := heap()
	bombs := map[string]http.Header{"long": {"X": {strings.Repeat("x", 2<<20)}}, "many": {}}
	for i := range 20_000 {
		bombs["many"][fmt.Sprintf("X-%d", i)] = []string{strings.Repeat("y", 50)}
	}
	for way, c := range s.httpClients(t) {
		for name, header := range bombs {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.base+testPath+"UnaryCall", nil)
			if err != nil {
				t.Fatal(err)
			}
			r.Header = header.Clone()
			r.Header.Set("Content-Type", "application/grpc")
			response, err := c.Do(r)
			if err == nil {
				response.Body.Close()
				if response.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
					t.Errorf("response over %s to a header bomb (%s) = %s, want 431", way, name, response.Status)
				}
			}
		}
	}
	if reached.Load() != 0 {
		t.Errorf("%d header bombs reached the component, want none", reached.Load())
	}
	if grown := int64(heap()) - int64(before); grown > 16<<20 {
		t.Errorf("heap growth = %d bytes, want at most 16 MiB", grown)
	}
	s.checkGet(t)
}

// checkGet checks that a GET over each protocol is answered, without the component.
func (s *testServer) checkGet(t testing.TB) {
	t.Helper()
	for way, err := range s.get(t, s.clientTLS()) {
		if err != nil {
			t.Errorf("GET over %s = %v", way, err)
		}
	}
}

// TestFaultW4_EarlyResets checks that requests that are reset immediately leave nothing behind.
func TestFaultW4_EarlyResets(t *testing.T) {
	s := startServer(t, &echo{})
	for way, c := range s.httpClients(t) {
		t.Run(way, func(t *testing.T) {
			before := runtime.NumGoroutine()
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					for i := range 250 {
						ctx, cancel := context.WithCancel(t.Context())
						r, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+testPath+"HalfDuplexCall", http.NoBody)
						if err != nil {
							t.Error(err)
						}
						r.Header.Set("Content-Type", "application/grpc")
						go func() {
							time.Sleep(time.Duration(i%20) * 50 * time.Microsecond) // pacing: resets at different times
							cancel()
						}()
						if response, err := c.Do(r); err == nil {
							_, _ = io.Copy(io.Discard, response.Body)
							response.Body.Close()
						}
						cancel()
					}
				})
			}
			wg.Wait()
			eventually(t, "no request is in progress", func() bool { return s.Stats().Requests == 0 })
			s.checkCall(t)
			eventually(t, "no goroutine is left", func() bool { return runtime.NumGoroutine() < before+20 })
		})
	}
}

// TestFaultW4_Migration checks that a connection survives a change of the client's address.
func TestFaultW4_Migration(t *testing.T) {
	s := startServer(t, &echo{})
	server, err := net.ResolveUDPAddr("udp", s.QUICAddress)
	if err != nil {
		t.Fatal(err)
	}
	c := s.clientTLS()
	c.NextProtos, c.ServerName = []string{http3.NextProtoH3}, "localhost"
	first, second := &quic.Transport{Conn: loopbackUDP(t)}, &quic.Transport{Conn: loopbackUDP(t)}
	defer first.Close()
	defer second.Close()
	var conn *quic.Conn
	transport := &http3.Transport{TLSClientConfig: c,
		Dial: func(ctx context.Context, _ string, tc *tls.Config, qc *quic.Config) (*quic.Conn, error) {
			var err error
			conn, err = first.DialEarly(ctx, server, tc, qc)
			return conn, err
		}}
	defer transport.Close()
	client := connect.NewClient[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse](&http.Client{Transport: transport},
		"https://"+s.QUICAddress+testPath+"FullDuplexCall", connect.WithGRPC())
	stream := client.CallBidiStream(t.Context())
	ping := func() {
		t.Helper()
		if err := stream.Send(&pb.StreamingOutputCallRequest{Payload: payload(10)}); err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Receive(); err != nil {
			t.Fatal(err)
		}
	}
	ping()
	path, err := conn.AddPath(second)
	if err != nil {
		t.Fatal(err)
	}
	if err := path.Probe(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := path.Switch(); err != nil {
		t.Fatal(err)
	}
	ping()
	unary := connect.NewClient[pb.SimpleRequest, pb.SimpleResponse](&http.Client{Transport: transport},
		"https://"+s.QUICAddress+testPath+"UnaryCall", connect.WithGRPC())
	if _, err := unary.CallUnary(t.Context(), connect.NewRequest(&pb.SimpleRequest{})); err != nil {
		t.Fatal(err)
	}
	if n := s.Stats().QUICConnections; n != 1 {
		t.Errorf("QUIC connections after the migration = %d, want 1", n)
	}
	if err := stream.CloseRequest(); err != nil {
		t.Fatal(err)
	}
}
