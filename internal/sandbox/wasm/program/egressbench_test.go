package program

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/network/netthread"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// large is the size of a response of serverMain to /large, in bytes.
const large = 256 << 20

// serverMain serves HTTP on the listener in descriptor 3: large bytes for the path /large, 100 bytes for others.
func serverMain() {
	l, err := net.FileListener(os.NewFile(3, "listener"))
	if err == nil {
		block := make([]byte, 64<<10)
		err = http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/large" {
				_, _ = w.Write(block[:100])
				return
			}
			for sent := 0; sent < large; sent += len(block) {
				_, _ = w.Write(block)
			}
		}))
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// startServer runs serverMain in a process of its own, and returns its URL.
func (w *world) startServer() string {
	w.t.Helper()
	l, err := net.Listen("tcp", worldIP+":0")
	require.NoError(w.t, err)
	defer l.Close()
	file, err := l.(*net.TCPListener).File()
	require.NoError(w.t, err)
	defer file.Close()
	server := program(w.t)
	server.Env, server.ExtraFiles, server.Stderr = []string{asServer + "=1"}, []*os.File{file}, os.Stderr
	require.NoError(w.t, server.Start())
	w.t.Cleanup(func() { _ = server.Process.Kill(); _ = server.Wait() })
	return "http://" + l.Addr().String()
}

// BenchmarkEgress compares requests that guests send with those of Go's client on the same route, in one run. Guests, client and
// server are in processes of their own. The metrics are ratios, of the rate of small requests and of the throughput of a large
// response, and MB/s.
func BenchmarkEgress(b *testing.B) {
	w := newWorld(b)
	server := w.startServer()
	c := w.caller("fetch-c", "*", func(s *workerapi.PodSpec) { s.Limits.RequestTimeout = time.Hour })
	native := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 32, DisableCompression: true,
		DialContext: func(_ context.Context, network, addr string) (conn net.Conn, err error) {
			err = netthread.In(int(w.netns.Fd()), func() error {
				conn, err = net.Dial(network, addr)
				return err
			})
			return conn, err
		}}}
	defer native.CloseIdleConnections()
	guests := func(path string, n int) {
		r, err := http.NewRequestWithContext(b.Context(), http.MethodGet, "http://"+c.cleartext.String()+"/drain", nil)
		require.NoError(b, err)
		r.Header.Set("X-Url", server+path)
		r.Header.Set("X-Count", fmt.Sprint(n))
		resp, err := http.DefaultClient.Do(r)
		require.NoError(b, err)
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		require.NoError(b, err)
		require.Equal(b, http.StatusOK, resp.StatusCode, "%s", text)
	}
	natives := func(path string, n int) {
		buf := make([]byte, 64<<10)
		for range n {
			resp, err := native.Get(server + path)
			require.NoError(b, err)
			_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, resp.Body, buf)
			resp.Body.Close()
			require.NoError(b, err)
		}
	}
	// parallel returns the time of n requests on each of several goroutines.
	parallel := func(do func(string, int), goroutines, n int, path string) time.Duration {
		began := time.Now()
		var all sync.WaitGroup
		for range goroutines {
			all.Go(func() { do(path, n) })
		}
		all.Wait()
		return time.Since(began)
	}
	for range b.N {
		for _, goroutines := range []int{1, 16} {
			n := 4000 / goroutines
			parallel(guests, goroutines, 10, "/") // connections
			parallel(natives, goroutines, 10, "/")
			g, p := parallel(guests, goroutines, n, "/"), parallel(natives, goroutines, n, "/")
			b.ReportMetric(p.Seconds()/g.Seconds(), fmt.Sprintf("rate%d/native", goroutines))
			b.ReportMetric(4000/g.Seconds(), fmt.Sprintf("calls%d/s", goroutines))
		}
		g, p := parallel(guests, 1, 2, "/large"), parallel(natives, 1, 2, "/large")
		b.ReportMetric(p.Seconds()/g.Seconds(), "body/native")
		b.ReportMetric(2*large/1e6/g.Seconds(), "body-MB/s")
	}
}
