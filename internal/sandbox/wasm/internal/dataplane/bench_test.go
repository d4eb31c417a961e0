package dataplane

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// BenchmarkUnary compares unary gRPC over HTTP/3 with a bare quic-go handler that echoes the body. Client and payload
// are the same, and they take turns of a tenth of a second. "ratio" is the request rate of gRPC divided by that of the
// bare handler. The goal for a component's whole path is 0.8, so the engine can use the difference.
//
// DATAPLANE_PROFILE=grpc|connect|bare runs only one of them, for profiling.
func BenchmarkUnary(b *testing.B) {
	invoker := invokerFunc(func(_ context.Context, _ *Method, c Call) error {
		m, err := c.Receive()
		if err != nil {
			return err
		}
		return c.Send(m)
	})
	for _, size := range []int{64, 1024, 16 << 10} {
		for _, clients := range []int{1, 16} {
			b.Run(fmt.Sprintf("payload=%d/clients=%d", size, clients), func(b *testing.B) {
				benchmarkUnary(b, invoker, size, clients)
			})
		}
	}
}

func benchmarkUnary(b *testing.B, invoker Invoker, size, clients int) {
	bare := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { _, _ = io.Copy(w, r.Body) })
	gs := startServer(b, invoker)
	ways := []struct {
		name, contentType string
		server            *testServer
		n                 int
		took              time.Duration
	}{
		{name: "bare", contentType: "application/octet-stream",
			server: startServer(b, invoker, func(_ *GRPCOptions, c *Config, _ *Material) { c.Handler = bare })},
		{name: "grpc", contentType: "application/grpc", server: gs},
		{name: "connect", contentType: "application/grpc-web", server: gs},
	}
	body := append([]byte{0, byte(size >> 24), byte(size >> 16), byte(size >> 8), byte(size)}, make([]byte, size)...)
	only := os.Getenv("DATAPLANE_PROFILE")
	for b.Loop() {
		for i := range ways {
			w := &ways[i]
			if only != "" && w.name != only {
				continue
			}
			c := w.server.httpClients(b)["h3"]
			n, took := drive(b, c, clients, 100*time.Millisecond, func() *http.Request {
				r, _ := http.NewRequest(http.MethodPost, c.base+testPath+"UnaryCall", bytes.NewReader(body))
				r.Header.Set("Content-Type", w.contentType)
				r.Header.Set("Te", "trailers")
				return r
			})
			w.n += n
			w.took += took
		}
	}
	rate := func(i int) float64 { return float64(ways[i].n) / max(ways[i].took.Seconds(), 1e-9) }
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(rate(0), "bare/s")
	b.ReportMetric(rate(1), "grpc/s")
	b.ReportMetric(rate(1)/max(rate(0), 1e-9), "ratio")
	b.ReportMetric(rate(2)/max(rate(0), 1e-9), "ratio-connect")
}

// drive sends requests from concurrent clients for a duration, and returns the number of responses and the elapsed
// time.
func drive(b *testing.B, c httpClient, clients int, during time.Duration, request func() *http.Request) (int, time.Duration) {
	one := func() {
		response, err := c.Do(request())
		if err != nil {
			b.Error(err)
			return
		}
		_, _ = io.Copy(io.Discard, response.Body)
		response.Body.Close()
		if response.StatusCode != http.StatusOK || response.Trailer.Get("Grpc-Status") != "0" && response.Trailer != nil {
			b.Errorf("response = %s, trailer %v", response.Status, response.Trailer)
		}
	}
	one() // opens the connection
	var n atomic.Int64
	var wg sync.WaitGroup
	started := time.Now()
	for range clients {
		wg.Go(func() {
			for time.Since(started) < during {
				one()
				n.Add(1)
			}
		})
	}
	wg.Wait()
	return int(n.Load()), time.Since(started)
}

// BenchmarkHandler measures framing without a transport: gRPC by this package, and gRPC-Web by connect-go.
func BenchmarkHandler(b *testing.B) {
	handler, err := NewGRPC(GRPCOptions{Methods: testMethods(), Options: Options{Metrics: NewMetrics(), Limiter: NewLimiter(64, time.Second)},
		Invoker: invokerFunc(func(_ context.Context, _ *Method, c Call) error {
			m, err := c.Receive()
			if err != nil {
				return err
			}
			return c.Send(m)
		})})
	if err != nil {
		b.Fatal(err)
	}
	body := framed(0, make([]byte, 64))
	for name, contentType := range map[string]string{"grpc": "application/grpc", "connect-go": "application/grpc-web"} {
		for _, timeout := range []string{"", "10S"} {
			b.Run(name+"/timeout="+timeout, func(b *testing.B) {
				b.ReportAllocs()
				header := http.Header{"Content-Type": {contentType}}
				if timeout != "" {
					header["Grpc-Timeout"] = []string{timeout}
				}
				for b.Loop() {
					r := &http.Request{
						Method: http.MethodPost, URL: &url.URL{Path: testPath + "UnaryCall"}, ProtoMajor: 2, Header: header,
						Body: io.NopCloser(bytes.NewReader(body)), RemoteAddr: "127.0.0.1:1",
					}
					handler.ServeHTTP(&nowhere{header: http.Header{}}, r)
				}
			})
		}
	}
}

// nowhere is a ResponseWriter that discards the response.
type nowhere struct{ header http.Header }

func (n *nowhere) Header() http.Header              { return n.header }
func (n *nowhere) Write(b []byte) (int, error)      { return len(b), nil }
func (n *nowhere) WriteHeader(int)                  {}
func (n *nowhere) FlushError() error                { return nil }
func (n *nowhere) SetReadDeadline(time.Time) error  { return nil }
func (n *nowhere) SetWriteDeadline(time.Time) error { return nil }

// BenchmarkLarge echoes messages of 1 MiB, four at a time.
func BenchmarkLarge(b *testing.B) {
	s := startServer(b, invokerFunc(func(_ context.Context, _ *Method, c Call) error {
		m, err := c.Receive()
		if err != nil {
			return err
		}
		return c.Send(m)
	}))
	body := framed(0, make([]byte, 1<<20))
	for way, c := range s.httpClients(b) {
		b.Run(way, func(b *testing.B) {
			for b.Loop() {
				n, took := drive(b, c, 4, 300*time.Millisecond, func() *http.Request {
					r, _ := http.NewRequest(http.MethodPost, c.base+testPath+"UnaryCall", bytes.NewReader(body))
					r.Header.Set("Content-Type", "application/grpc")
					return r
				})
				b.ReportMetric(float64(n)*(1<<20)/1e6/took.Seconds(), "MB/s-each-way")
			}
		})
	}
}
