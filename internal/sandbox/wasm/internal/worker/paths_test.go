package worker

import (
	"bytes"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/test/guestbuild"
)

// BenchmarkJavaScript measures a unary call of a component in JavaScript on both of the engine's paths, without the
// network: the worker's share of a request.
func BenchmarkJavaScript(b *testing.B) {
	for _, path := range []engine.Path{engine.PathCore, engine.PathComponent} {
		b.Run(path.String(), func(b *testing.B) {
			e, err := engine.New(engine.Config{Instances: 64})
			require.NoError(b, err)
			options := CompileOptions()
			options.ComponentPath = path == engine.PathComponent
			s := newServingBy(b, e, examples+"greeter-js/greeter-js.wasm", examples+"greeter/greeter.proto", workerapi.PodSpec{}, options)
			require.Equal(b, path, s.pod.code.engine.Path(), s.pod.code.OwnWorkerReason)
			m := s.methodOf(b, "/greet.v1.Greeter/SayHello")
			fresh, reused := workerapi.Limits{}, workerapi.Limits{Reuse: true}
			require.NoError(b, fillLimits(&fresh))
			require.NoError(b, fillLimits(&reused))
			b.Run("instance", func(b *testing.B) {
				reportUsage(b, func() {
					for b.Loop() {
						g, err := s.pod.instantiate(b.Context(), fresh)
						require.NoError(b, err)
						g.Close()
					}
				})
			})
			for name, limits := range map[string]*workerapi.Limits{"one": &fresh, "reused": &reused} {
				b.Run(name, func(b *testing.B) {
					s.limits.Store(limits)
					defer s.limits.Store(&fresh)
					call := &oneCall{request: []byte("\x0a\x03Ada"), header: http.Header{}, trailer: http.Header{}}
					reportUsage(b, func() {
						for b.Loop() {
							if err := s.Invoke(b.Context(), m, call); err != nil {
								b.Fatal(err)
							}
						}
					})
				})
			}
			b.Run("parallel", func(b *testing.B) {
				b.SetParallelism(16)
				b.RunParallel(func(pb *testing.PB) {
					call := &oneCall{request: []byte("\x0a\x03Ada"), header: http.Header{}, trailer: http.Header{}}
					for pb.Next() {
						if err := s.Invoke(b.Context(), m, call); err != nil {
							b.Error(err)
							return
						}
					}
				})
			})
		})
	}
}

// reportUsage reports the page faults of each iteration, and the processor time of this process. Both depend less than
// the elapsed time on what else the machine does.
func reportUsage(b *testing.B, run func()) {
	var before, after unix.Rusage
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &before))
	run()
	require.NoError(b, unix.Getrusage(unix.RUSAGE_SELF, &after))
	micros := func(before, after unix.Timeval) float64 {
		return float64(after.Nano()-before.Nano()) / 1000 / float64(b.N)
	}
	b.ReportMetric(micros(before.Utime, after.Utime), "user-µs/op")
	b.ReportMetric(micros(before.Stime, after.Stime), "sys-µs/op")
	b.ReportMetric(float64(after.Minflt-before.Minflt)/float64(b.N), "faults/op")
}

// TestPathsAgree sends the same calls to components on both paths, and to their quick code: messages, metadata and errors must be
// the same.
func TestPathsAgree(t *testing.T) {
	t.Run("js", func(t *testing.T) { agree(t, "greeter-js", false) }) // Winch has no tail calls
	t.Run("c", func(t *testing.T) { agree(t, "greeter-c", false, true) })
}

func agree(t *testing.T, component string, quick ...bool) {
	var servers []*server
	for _, quick := range quick {
		for _, path := range []engine.Path{engine.PathCore, engine.PathComponent} {
			servers = append(servers, pathServer(t, component, path, quick))
		}
	}
	long := append([]byte("\x0a\x80\x80\x40"), bytes.Repeat([]byte("a"), 1<<20)...)
	for name, request := range map[string][]byte{
		"a name": []byte("\x0a\x03Ada"), "another language": []byte("\x0a\x03Ada\x10\x01"), "an error": nil,
		"Unicode": []byte("\x0a\x04\xf0\x9f\x90\x99"),
		"1 MiB":   long, "an unknown field": []byte("\x0a\x03Ada\xa0\x06\x01"), "no protobuf": []byte("\xff"),
	} {
		var calls []*oneCall
		var errs []error
		for n, s := range servers {
			call := &oneCall{request: request, header: http.Header{}, trailer: http.Header{}}
			errs = append(errs, s.Invoke(t.Context(), s.methodOf(t, "/greet.v1.Greeter/SayHello"), call))
			calls = append(calls, call)
			require.Equal(t, calls[0], calls[n], name)
			require.Equal(t, errs[0], errs[n], name)
		}
		require.Equal(t, name == "an error" || name == "no protobuf", errs[0] != nil, "%s: %v", name, errs[0])
	}
}

// pathServer serves a Greeter on a path.
func pathServer(t *testing.T, component string, path engine.Path, quick bool) *server {
	e, err := engine.New(engine.Config{Instances: 16, Quick: quick})
	require.NoError(t, err)
	options := CompileOptions()
	options.ComponentPath = path == engine.PathComponent
	spec := workerapi.PodSpec{Env: []string{"POD_NAME=ada's"}}
	s := newServingBy(t, e, examples+component+"/"+component+".wasm", examples+"greeter/greeter.proto", spec, options)
	require.Equal(t, path, s.pod.code.engine.Path(), s.pod.code.OwnWorkerReason)
	require.Equal(t, path == engine.PathComponent, s.pod.code.OwnWorkerReason != "")
	limits := *s.limits.Load()
	limits.RequestTimeout = time.Hour // 1 MiB takes the interpreter long on a busy machine
	s.limits.Store(&limits)
	return s
}

// BenchmarkQuick compares calls by optimised and by quick code, without the network, in a fresh instance each. The environment
// variable TRIPOD_BENCH_GREETER can name another Greeter than the one in Go, such as one in Python.
func BenchmarkQuick(b *testing.B) {
	greeters := map[string]string{"c": examples + "greeter-c/greeter-c.wasm", "go": guestbuild.Wasm(b, examples+"greeter-go", ".")}
	if other := os.Getenv("TRIPOD_BENCH_GREETER"); other != "" {
		greeters["other"] = other
	}
	for _, name := range slices.Sorted(maps.Keys(greeters)) {
		for _, quick := range []bool{false, true} {
			b.Run(fmt.Sprintf("%s/quick=%t", name, quick), func(b *testing.B) {
				e, err := engine.New(engine.Config{Instances: 16, Quick: quick})
				require.NoError(b, err)
				s := newServingOn(b, e, greeters[name], examples+"greeter/greeter.proto", workerapi.PodSpec{})
				m := s.methodOf(b, "/greet.v1.Greeter/SayHello")
				call := &oneCall{request: []byte("\x0a\x03Ada"), header: http.Header{}, trailer: http.Header{}}
				reportUsage(b, func() {
					for b.Loop() {
						if err := s.Invoke(b.Context(), m, call); err != nil {
							b.Fatal(err)
						}
					}
				})
			})
		}
	}
}
