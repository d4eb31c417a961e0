package worker

import (
	"context"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

const examples = "../../../../../examples/wasm/"

// oneCall is a unary call without a network.
type oneCall struct {
	request         []byte
	reply           []byte
	header, trailer http.Header
}

func (c *oneCall) Receive() ([]byte, error) { return c.request, nil }
func (c *oneCall) Send(m []byte) error {
	c.reply = append(c.reply[:0], m...)
	return nil
}
func (c *oneCall) SendHeader() error            { return nil }
func (c *oneCall) Interrupt()                   {}
func (c *oneCall) RequestHeader() http.Header   { return http.Header{"User-Agent": {"bench"}} }
func (c *oneCall) ResponseHeader() http.Header  { return c.header }
func (c *oneCall) ResponseTrailer() http.Header { return c.trailer }
func (c *oneCall) Peer() string                 { return "127.0.0.1:1" }

// newServing starts a pod of an example, without sockets, in an in-process worker, and returns the pod's server.
func newServing(tb testing.TB, example, file string, limits workerapi.Limits) *server {
	tb.Helper()
	e, err := engine.New(engine.Config{Instances: 16})
	require.NoError(tb, err)
	return newServingOn(tb, e, examples+example+"/"+example+".wasm", file, workerapi.PodSpec{Limits: limits})
}

// newServingOn starts a pod of a binary with the services of a .proto file.
func newServingOn(tb testing.TB, e *engine.Engine, binary, file string, spec workerapi.PodSpec) *server {
	tb.Helper()
	return newServingBy(tb, e, binary, file, spec, CompileOptions())
}

func newServingBy(tb testing.TB, e *engine.Engine, binary, file string, spec workerapi.PodSpec, options engine.CompileOptions) *server {
	tb.Helper()
	w := New(Config{Engine: e, Logger: slog.New(slog.DiscardHandler), Publish: func(workerapi.Event) {}})
	tb.Cleanup(w.Close)
	loadServer(tb, w, binary, file, options)
	spec.ID = "pod"
	return startServer(tb, w, spec)
}

// loadServer loads a component with its descriptors.
func loadServer(tb testing.TB, w *Worker, binary, file string, options engine.CompileOptions) {
	tb.Helper()
	wasm, err := os.ReadFile(binary)
	require.NoError(tb, err)
	image, err := w.engine.Compile(context.Background(), wasm, options)
	require.NoError(tb, err)
	path := filepath.Join(tb.TempDir(), "code")
	require.NoError(tb, os.WriteFile(path, image, 0o600))
	code, err := os.Open(path)
	require.NoError(tb, err)
	schema, err := protosource.Compile(context.Background(), []string{file}, nil)
	require.NoError(tb, err)
	set, err := proto.Marshal(schema.Set)
	require.NoError(tb, err)
	_, err = w.Load(context.Background(), workerapi.Code{Digest: "d", Image: workerapi.File{File: code}, Descriptors: set})
	require.NoError(tb, err)
}

// startServer starts a pod with the loaded component.
func startServer(tb testing.TB, w *Worker, spec workerapi.PodSpec) *server {
	tb.Helper()
	spec.Digest = "d"
	_, err := w.Start(context.Background(), spec)
	require.NoError(tb, err)
	p, err := w.pod(spec.ID)
	require.NoError(tb, err)
	return p.program.(*server)
}

func (s *server) methodOf(tb testing.TB, procedure string) *dataplane.Method {
	for _, m := range s.pod.code.methods {
		if m.Procedure == procedure {
			return m
		}
	}
	tb.Fatalf("no method %s", procedure)
	return nil
}

// BenchmarkInvoke measures a unary call without the network: the worker's share of a request.
func BenchmarkInvoke(b *testing.B) {
	for name, c := range map[string]struct {
		limits workerapi.Limits
		size   int
	}{
		"fresh": {workerapi.Limits{}, 16}, "reuse": {workerapi.Limits{Reuse: true}, 16}, "fresh 1 MiB": {workerapi.Limits{}, 1 << 20},
	} {
		b.Run(name, func(b *testing.B) {
			s := newServing(b, "faults-c", examples+"faults-c/faults.proto", c.limits)
			m := s.methodOf(b, "/faults.v1.Faults/Echo")
			payload, err := proto.Marshal(&wrapperspb.BytesValue{Value: make([]byte, c.size)})
			require.NoError(b, err)
			call := &oneCall{request: payload, header: http.Header{}, trailer: http.Header{}}
			b.SetBytes(int64(c.size))
			b.ReportAllocs()
			for b.Loop() {
				if err := s.Invoke(b.Context(), m, call); err != nil {
					b.Fatal(err)
				}
			}
			require.Equal(b, payload, call.reply)
		})
	}
}
