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

// heap is what lives after a collection.
func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}

// served calls the server over HTTP/3 with a connection of its own.
func (s *testServer) served(t testing.TB) {
	t.Helper()
	transport := &http3.Transport{TLSClientConfig: s.clientTLS()}
	defer transport.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	client := connect.NewClient[pb.SimpleRequest, pb.SimpleResponse](&http.Client{Transport: transport}, "https://"+s.QUICAddress+testPath+"UnaryCall", connect.WithGRPC())
	if _, err := client.CallUnary(ctx, connect.NewRequest(&pb.SimpleRequest{Payload: payload(10)})); err != nil {
		t.Errorf("others are not served: %v", err)
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

// deaf is a socket that sends and never hears: the client of a handshake that goes no further.
type deaf struct{ *net.UDPConn }

func (d deaf) ReadFrom(p []byte) (int, net.Addr, error) {
	for {
		if _, _, err := d.UDPConn.ReadFrom(p); err != nil {
			return 0, nil, err
		}
	}
}

// SyscallConn hides the socket, which quic-go would otherwise read by itself.
func (d deaf) SyscallConn() {}

// TestFaultW4_HandshakeFlood: handshakes that never end leave state for a few; the rest must prove their address first,
// and so do those who come for real, who are served all the same. In the end nothing is left.
func TestFaultW4_HandshakeFlood(t *testing.T) {
	s := startServer(t, &echo{})
	s.served(t)
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
	eventually(t, "the flood is there", func() bool { return s.quic.handshakes.Load() >= handshakesUnverified })
	for range 5 {
		s.served(t)
		if n := s.quic.handshakes.Load(); n > handshakesUnverified+1 {
			t.Errorf("%d handshakes of the flood have state", n)
		}
	}
	cancel()
	wg.Wait()
	deadline := time.Now().Add(30 * time.Second)
	for s.quic.handshakes.Load() > 0 || s.Stats().QUICConnections > 0 {
		if time.Now().After(deadline) {
			t.Fatalf("left: %d handshakes, %d connections", s.quic.handshakes.Load(), s.Stats().QUICConnections)
		}
		time.Sleep(50 * time.Millisecond) // pacing: quic-go's timers end them
	}
	if !strings.Contains(s.log.String(), "QUIC handshake failed") {
		t.Error("nothing is logged")
	}
	if lines := strings.Count(s.log.String(), "QUIC handshake failed"); lines > 150 {
		t.Errorf("the flood became %d lines", lines)
	}
}

// TestFaultW4_IdleConnections: connections are bounded, for TCP and for QUIC, cost little each, and a flood of idle
// ones keeps neither those out that are in nor newcomers.
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
			t.Fatalf("%d connections are in", n)
		}
	}
	// Client and server are one process here, so half of it is the client's.
	t.Logf("%d KiB per idle QUIC connection, client and server together", (heap()-before)/limit/1024)
	if each := (heap() - before) / limit; each > 400<<10 {
		t.Errorf("an idle connection costs %d bytes", each)
	}
	if err := call(); err != nil {
		t.Errorf("who is in is not served: %v", err)
	}
	if _, err := s.udp.Admit(nil, nil); err != nil {
		t.Errorf("there is no room for a newcomer: %v", err)
	}
	if n := s.Stats().Rejected[connlimit.ReasonDisplaced]; n < tried-limit {
		t.Errorf("%d connections were displaced", n)
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
	eventually(t, "the oldest are closed for the newest", closed)
	last := tcp[tried-1]
	fmt.Fprintf(last, "GET /none HTTP/1.1\r\nHost: x\r\n\r\n")
	_ = last.SetReadDeadline(time.Now().Add(5 * time.Second))
	var b [12]byte
	if _, err := io.ReadFull(last, b[:]); err != nil || string(b[:]) != "HTTP/1.1 404" {
		t.Errorf("a newcomer is not served: %q, %v", b, err)
	}
	if !strings.Contains(s.log.String(), "connections were rejected") {
		t.Error("it is not logged")
	}
}

// TestFaultW4_HeaderBomb: headers over the limit are refused, whether of one long field or of many, and nothing of them
// stays.
func TestFaultW4_HeaderBomb(t *testing.T) {
	var reached atomic.Int64
	s := startServer(t, invokerFunc(func(_ context.Context, _ *Method, c Call) error {
		reached.Add(1)
		return Errorf(0, "reached")
	}))
	s.served2(t)
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
					t.Errorf("%s, %s: %s", way, name, response.Status)
				}
			}
		}
	}
	if reached.Load() != 0 {
		t.Errorf("%d bombs reached the component", reached.Load())
	}
	if grown := int64(heap()) - int64(before); grown > 16<<20 {
		t.Errorf("%d bytes stay", grown)
	}
	s.served2(t)
}

// served2 is served for servers whose component answers nothing.
func (s *testServer) served2(t testing.TB) {
	t.Helper()
	for way, err := range s.get(t, s.clientTLS()) {
		if err != nil {
			t.Errorf("others are not served over %s: %v", way, err)
		}
	}
}

// TestFaultW4_EarlyResets: requests that are reset as soon as they are made leave nothing behind.
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
							time.Sleep(time.Duration(i%20) * 50 * time.Microsecond) // resets that come at different moments
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
			eventually(t, "no request is under way", func() bool { return s.Stats().Requests == 0 })
			s.served(t)
			eventually(t, "no goroutine is left", func() bool { return runtime.NumGoroutine() < before+20 })
		})
	}
}

// TestFaultW4_Migration: a client that changes its address in the middle of a connection goes on.
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
	transport := &http3.Transport{TLSClientConfig: c, Dial: func(ctx context.Context, _ string, tc *tls.Config, qc *quic.Config) (*quic.Conn, error) {
		var err error
		conn, err = first.DialEarly(ctx, server, tc, qc)
		return conn, err
	}}
	defer transport.Close()
	client := connect.NewClient[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse](&http.Client{Transport: transport}, "https://"+s.QUICAddress+testPath+"FullDuplexCall", connect.WithGRPC())
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
	unary := connect.NewClient[pb.SimpleRequest, pb.SimpleResponse](&http.Client{Transport: transport}, "https://"+s.QUICAddress+testPath+"UnaryCall", connect.WithGRPC())
	if _, err := unary.CallUnary(t.Context(), connect.NewRequest(&pb.SimpleRequest{})); err != nil {
		t.Fatal(err)
	}
	if n := s.Stats().QUICConnections; n != 1 {
		t.Errorf("%d connections", n)
	}
	if err := stream.CloseRequest(); err != nil {
		t.Fatal(err)
	}
}
