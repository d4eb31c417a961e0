package dataplane

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
)

// passCodec passes messages as bytes.
type passCodec struct{}

func (passCodec) Marshal(v any) (mem.BufferSlice, error) { return *(v.(*mem.BufferSlice)), nil }

func (passCodec) Unmarshal(b mem.BufferSlice, v any) error {
	b.Ref()
	*(v.(*mem.BufferSlice)) = b
	return nil
}

// Name is that of protobuf, because a component serves no other encoding.
func (passCodec) Name() string { return "proto" }

// BenchmarkHTTP2 compares unary gRPC over HTTP/2 with grpc-go's server, without a component: both echo 16 bytes. The
// client is grpc-go, and the servers take turns of half a second. "ratio" is our rate divided by grpc-go's.
func BenchmarkHTTP2(b *testing.B) {
	for _, overTLS := range []bool{false, true} {
		for _, connections := range []int{1, 32} {
			b.Run(fmt.Sprintf("tls=%t/connections=%d", overTLS, connections), func(b *testing.B) {
				ours := startServer(b, invokerFunc(func(_ context.Context, _ *Method, c Call) error {
					m, err := c.Receive()
					if err != nil {
						return err
					}
					return c.Send(m)
				}))
				secure := credentials.NewTLS(ours.clientTLS())
				server := insecure.NewCredentials()
				addresses := []string{ours.CleartextAddress, ""}
				client := insecure.NewCredentials()
				if overTLS {
					addresses[0], client = ours.TLSAddress, secure
					server = credentials.NewTLS(ours.TLS.config("h2"))
				}
				addresses[1] = startGRPC(b, server)
				benchmarkHTTP2(b, addresses, client, connections)
			})
		}
	}
}

// startGRPC starts a grpc-go server that echoes the messages of all methods, and returns its address.
func startGRPC(b *testing.B, secure credentials.TransportCredentials) string {
	b.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	echo := func(_ any, s grpc.ServerStream) error {
		var m mem.BufferSlice
		if err := s.RecvMsg(&m); err != nil {
			return err
		}
		return s.SendMsg(&m)
	}
	server := grpc.NewServer(grpc.Creds(secure), grpc.ForceServerCodecV2(passCodec{}), grpc.UnknownServiceHandler(echo))
	go func() { _ = server.Serve(l) }()
	b.Cleanup(server.Stop)
	return l.Addr().String()
}

func benchmarkHTTP2(b *testing.B, addresses []string, secure credentials.TransportCredentials, connections int) {
	clients := make([][]*grpc.ClientConn, len(addresses))
	for i, address := range addresses {
		for range connections {
			c, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(secure))
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { c.Close() })
			clients[i] = append(clients[i], c)
		}
	}
	var calls [2]float64
	var took [2]time.Duration
	for b.Loop() {
		for i := range addresses {
			n, d := echoCalls(b, clients[i], 500*time.Millisecond)
			calls[i] += float64(n)
			took[i] += d
		}
	}
	rate := func(i int) float64 { return calls[i] / took[i].Seconds() }
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(rate(0), "ours/s")
	b.ReportMetric(rate(1), "grpc-go/s")
	b.ReportMetric(rate(0)/rate(1), "ratio")
}

// echoCalls makes calls on each connection, one after the other, for a duration. It returns how many there were.
func echoCalls(b *testing.B, clients []*grpc.ClientConn, during time.Duration) (int64, time.Duration) {
	message := mem.BufferSlice{mem.SliceBuffer(make([]byte, 16))}
	var n atomic.Int64
	var wg sync.WaitGroup
	started := time.Now()
	for _, c := range clients {
		wg.Go(func() {
			for time.Since(started) < during {
				in, out := message, mem.BufferSlice{}
				if err := c.Invoke(context.Background(), testPath+"UnaryCall", &in, &out, grpc.ForceCodecV2(passCodec{})); err != nil {
					b.Error(err)
					return
				}
				n.Add(1)
			}
		})
	}
	wg.Wait()
	return n.Load(), time.Since(started)
}

// BenchmarkIdleMemory compares the memory of idle connections, and of streams that wait for a message, with that of
// grpc-go's server. The clients only write frames, so nearly all of the memory is the servers'. "ratio" is ours divided by
// grpc-go's.
func BenchmarkIdleMemory(b *testing.B) {
	const connections = 5000 // with their other ends, half of what a process may usually have open
	wait := invokerFunc(func(_ context.Context, _ *Method, c Call) error {
		_, err := c.Receive()
		return err
	})
	ours := startServer(b, wait, func(_ *GRPCOptions, c *Config, _ *Material) { c.Connections.Max = 2 * connections })
	addresses := []string{ours.CleartextAddress, startGRPC(b, insecure.NewCredentials())}
	for _, streams := range []int{0, 1} {
		b.Run(fmt.Sprintf("streams=%d", streams), func(b *testing.B) {
			var each [2]float64
			for b.Loop() {
				for i, address := range addresses {
					each[i] = idleMemory(b, address, connections, streams)
				}
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(each[0]/1024, "ours-KiB")
			b.ReportMetric(each[1]/1024, "grpc-go-KiB")
			b.ReportMetric(each[0]/each[1], "ratio")
		})
	}
}

// idleMemory returns how much memory a connection with waiting streams takes, in bytes.
func idleMemory(b *testing.B, address string, connections, streams int) float64 {
	before, goroutines := heap(), runtime.NumGoroutine()
	var clients []rawHTTP2
	for range connections {
		c := dialRaw(b, address)
		for i := range streams {
			c.request(b, uint32(2*i+1), false, testPath+"FullDuplexCall", "content-type", "application/grpc")
		}
		// The answer to a ping says that the server has seen all of it.
		if err := c.WritePing(false, [8]byte{1}); err != nil {
			b.Fatal(err)
		}
		for {
			f, err := c.ReadFrame()
			if err != nil {
				b.Fatal(err)
			}
			if p, ok := f.(*http2.PingFrame); ok && p.IsAck() {
				break
			}
		}
		c.Framer = nil // and its buffers
		clients = append(clients, c)
	}
	each := float64(heap()-before) / float64(connections)
	for _, c := range clients {
		c.conn.Close()
	}
	eventually(b, "the connections are gone", func() bool { return runtime.NumGoroutine() <= goroutines+2 })
	return each
}

// BenchmarkH2load compares with grpc-go's server by a client that is not in Go, h2load of nghttp2: unary gRPC with 16 bytes
// on 32 connections, with one call and with ten at a time on each.
func BenchmarkH2load(b *testing.B) {
	ours := startServer(b, invokerFunc(func(_ context.Context, _ *Method, c Call) error {
		m, err := c.Receive()
		if err != nil {
			return err
		}
		return c.Send(m)
	}))
	message := filepath.Join(b.TempDir(), "message")
	if err := os.WriteFile(message, framed(0, make([]byte, 16)), 0o600); err != nil {
		b.Fatal(err)
	}
	addresses := []string{ours.CleartextAddress, startGRPC(b, insecure.NewCredentials())}
	for _, streams := range []string{"1", "10"} {
		b.Run("streams="+streams, func(b *testing.B) {
			var rates [2]float64
			turns := 0.
			for ; b.Loop(); turns++ {
				for i, address := range addresses {
					rates[i] += h2load(b, "-D1", "-c32", "-m"+streams, "-d"+message, "-Hcontent-type: application/grpc", "-Hte: trailers",
						"http://"+address+testPath+"UnaryCall")
				}
			}
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(rates[0]/turns, "ours/s")
			b.ReportMetric(rates[1]/turns, "grpc-go/s")
			b.ReportMetric(rates[0]/rates[1], "ratio")
		})
	}
}

var h2loadRate = regexp.MustCompile(`finished in .*, ([0-9.]+) req/s`)

// h2load returns the rate of requests that h2load measures.
func h2load(b *testing.B, args ...string) float64 {
	b.Helper()
	out, err := exec.Command("h2load", args...).CombinedOutput()
	found := h2loadRate.FindSubmatch(out)
	if err != nil || found == nil || !bytes.Contains(out, []byte(" 0 failed, 0 errored")) {
		b.Fatalf("h2load: %v\n%s", err, out)
	}
	rate, err := strconv.ParseFloat(string(found[1]), 64)
	if err != nil {
		b.Fatal(err)
	}
	return rate
}
