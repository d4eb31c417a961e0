package wasm

import (
	"fmt"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// BenchmarkUp measures the backend's part of creating and starting a pod whose code is loaded. The worker is the fake
// one, so the result includes the round trips to the worker but not its work.
func BenchmarkUp(b *testing.B) {
	r := newRig(b)
	r.run("first", "world=grpc")
	var create, start time.Duration
	n := 0
	for b.Loop() {
		p := r.podConfig(fmt.Sprint("p", n))
		r.known[p.ID] = sandbox.Known{Pod: p}
		n++
		began := time.Now()
		r.must(r.CreateSandbox(r.ctx(), p))
		c := r.container(p, "world=grpc")
		c.Config.Mounts = []*runtimeapi.Mount{{ContainerPath: "/data", HostPath: "/tmp"}}
		_, err := r.CreateContainer(r.ctx(), p, c)
		r.must(err)
		create += time.Since(began)
		began = time.Now()
		r.must(r.StartContainer(r.ctx(), p, c))
		start += time.Since(began)
	}
	b.ReportMetric(float64(create.Microseconds())/float64(n), "µs/create")
	b.ReportMetric(float64(start.Microseconds())/float64(n), "µs/start")
}
