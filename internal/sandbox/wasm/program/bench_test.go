package program

import (
	"bytes"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// BenchmarkHTTP3 measures unary gRPC over HTTP/3 through the worker, with a fresh instance per request.
func BenchmarkHTTP3(b *testing.B) {
	r := startWorker(b, workerapi.WorkerConfig{})
	p := r.serve("faults-c")
	client := p.overHTTP3()
	url := "https://" + p.tls.String() + "/faults.v1.Faults/Echo"
	payload := append([]byte{0, 0, 0, 0, 18, 0x0a, 16}, make([]byte, 16)...)
	before, cpu := p.stats(), r.cpuTime()
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			req, err := http.NewRequest(http.MethodPost, url, bytes.NewReader(payload))
			if err != nil {
				b.Error(err)
				return
			}
			req.Header.Set("Content-Type", "application/grpc")
			req.Header.Set("Te", "trailers")
			resp, err := client.Do(req)
			if err != nil {
				b.Error(err)
				return
			}
			reply, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || !bytes.Equal(reply, payload) || resp.Trailer.Get("Grpc-Status") != "0" {
				b.Errorf("reply of %d bytes, trailer %v, %v", len(reply), resp.Trailer, err)
				return
			}
		}
	})
	after := p.stats()
	b.ReportMetric(float64(r.cpuTime()-cpu)/float64(b.N), "worker-ns/op")
	b.ReportMetric(float64(after.CPUNanos-before.CPUNanos)/float64(b.N), "guest-ns/op")
	require.Equal(b, uint64(b.N), after.Requests-before.Requests)
}

// cpuTime returns the CPU time of all threads of the worker (clock_getcpuclockid(3)).
func (r *rig) cpuTime() time.Duration {
	r.t.Helper()
	var ts unix.Timespec
	clock := int32(^r.process.Pid<<3 | 2)
	require.NoError(r.t, unix.ClockGettime(clock, &ts))
	return time.Duration(ts.Nano())
}
