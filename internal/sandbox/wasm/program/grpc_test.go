package program

import (
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

const greeterProto = examples + "greeter/greeter.proto"

// TestGreeter calls methods of all arities over all protocols, in components of two languages.
func TestGreeter(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	for _, example := range []string{"greeter-c", "greeter-js"} {
		p := r.serve(example)
		for name, conn := range map[string]*grpc.ClientConn{"h2c": p.overH2C(), "tls": p.overTLS(), "router": p.overRouter()} {
			t.Run(example+"/"+name, func(t *testing.T) { testArities(t, newService(t, conn, greeterProto, "greet.v1.Greeter")) })
		}
		t.Run(example+"/http3", func(t *testing.T) {
			code, body, resp := post(t, p.overHTTP3(), "https://"+p.tls.String()+"/greet.v1.Greeter/SayHello", `{"name":"Ada"}`)
			require.Equal(t, http.StatusOK, code)
			require.Equal(t, 3, resp.ProtoMajor)
			require.JSONEq(t, `{"message":"Hello, Ada!","servedBy":"the pod"}`, body)
		})
		require.Contains(t, p.logged("stdout"), "SayHello Ada from 127.0.0.1:")
	}
}

func testArities(t *testing.T, s *service) {
	var header, trailer metadata.MD
	ctx := metadata.AppendToOutgoingContext(t.Context(), "x-request-id", "r1", "x-trace-bin", "\x00\xff")
	reply, err := s.call(ctx, "SayHello", `{"name":"Ada","language":"LANGUAGE_GERMAN"}`, grpc.Header(&header), grpc.Trailer(&trailer))
	require.NoError(t, err)
	require.Equal(t, map[string]any{"message": "Hallo, Ada!", "servedBy": "the pod"}, reply)
	require.Equal(t, []string{"r1"}, header["x-request-id"])
	require.Equal(t, []string{"\x00\xff"}, trailer["x-trace-bin"])

	_, err = s.call(t.Context(), "SayHello", `{}`)
	st := status.Convert(err)
	require.Equal(t, codes.InvalidArgument, st.Code())
	require.Equal(t, "name: must not be empty", st.Message())
	require.Len(t, st.Details(), 1)

	down := s.stream(t.Context(), "Countdown")
	require.NoError(t, down.send(`{"from":3}`))
	require.NoError(t, down.CloseSend())
	for want := 3.0; want >= 0; want-- {
		reply, err := down.receive()
		require.NoError(t, err)
		require.Equal(t, want, reply["number"])
	}
	_, err = down.receive()
	require.Equal(t, io.EOF, err)

	all := s.stream(t.Context(), "Collect")
	require.NoError(t, all.send(`{"name":"Ada"}`))
	require.NoError(t, all.send(`{"name":"Bob"}`))
	require.NoError(t, all.CloseSend())
	reply, err = all.receive()
	require.NoError(t, err)
	require.Equal(t, "Hello, Ada, Bob!", reply["message"])

	chat := s.stream(t.Context(), "Chat")
	for _, name := range []string{"Ada", "Bob", "Eve"} {
		require.NoError(t, chat.send(fmt.Sprintf(`{"name":%q}`, name)))
		reply, err := chat.receive()
		require.NoError(t, err)
		require.Equal(t, "Hello, "+name+"!", reply["message"])
	}
	require.NoError(t, chat.CloseSend())
	_, err = chat.receive()
	require.Equal(t, io.EOF, err)
}

// TestW1_RunawayGuests and TestW2_Traps cover rows of docs/faults.md: a fault affects only its own request.
func TestW1_RunawayGuests(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.serve("faults-c", func(s *workerapi.PodSpec) {
		s.Limits.RequestTimeout = 2 * time.Second
		s.Resources.MemoryBytes = 64 << 20
	})
	s := p.faults()
	var others sync.WaitGroup
	stop := make(chan struct{})
	others.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				if _, err := s.call(t.Context(), "Echo", `{"data":"aGVsbG8="}`); err != nil {
					t.Errorf("concurrent request = %v", err)
					return
				}
			}
		}
	})
	_, err := s.call(t.Context(), "Spin", `{}`)
	require.Equal(t, codes.DeadlineExceeded, status.Code(err), "%v", err)
	// The other methods end by themselves, which on a busy machine takes longer than the timeout for Spin.
	require.NoError(t, r.Update(t.Context(), workerapi.Update{ID: p.ID, Limits: &workerapi.Limits{RequestTimeout: time.Minute}}))
	for _, c := range []struct {
		method, request string
		code            codes.Code
	}{
		{"Recurse", `{}`, codes.Internal},
		{"Allocate", `{"value":"100000000"}`, codes.ResourceExhausted},
		{"Headers", `{"value":"4000000000"}`, codes.ResourceExhausted},
	} {
		_, err := s.call(t.Context(), c.method, c.request)
		require.Equal(t, c.code, status.Code(err), "%s: %v", c.method, err)
	}
	// The client's deadline is earlier than the pod's.
	begun := time.Now()
	_, err = s.call(withTimeout(t, 100*time.Millisecond), "Spin", `{}`)
	require.Equal(t, codes.DeadlineExceeded, status.Code(err))
	require.Less(t, time.Since(begun), time.Minute)
	close(stop)
	others.Wait()
	alone := func() bool { return p.stats().Instances == 0 }
	eventually(t, "the limit is one instance's", alone)
	reply := s.must("Grow", `{"value":"1000000000"}`) // grows until it is refused, and returns the size
	require.Less(t, reply["value"], "67108865", "%v", reply)
	eventually(t, "no instance is left", alone)
	st := p.stats()
	require.GreaterOrEqual(t, st.Timeouts, uint64(1))
	require.GreaterOrEqual(t, st.Traps, uint64(1))
	require.Zero(t, st.Active)
}

func TestW2_Traps(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.serve("faults-c", func(s *workerapi.PodSpec) { s.Limits.Reuse = true })
	s := p.faults()
	s.must("Count", `{}`)
	require.Equal(t, "2", s.must("Count", `{}`)["value"], "the instance must be reused")
	for kind, cause := range map[string]string{
		"UNREACHABLE": "unreachable", "OUT_OF_BOUNDS": "out of bounds", "DIVIDE_BY_ZERO": "divide by zero", "INDIRECT_CALL": "indirect call",
	} {
		_, err := s.call(t.Context(), "Trap", fmt.Sprintf(`{"kind":%q}`, kind))
		require.Equal(t, codes.Internal, status.Code(err))
		require.Contains(t, p.logged("stderr"), cause)
		require.Contains(t, p.logged("stderr"), "tripod: /faults.v1.Faults/Trap: ")
		require.Equal(t, "1", s.must("Count", `{}`)["value"], "the instance that trapped must not be reused")
	}
	_, err := s.call(t.Context(), "Exit", `{"value":"3"}`)
	require.Equal(t, codes.Internal, status.Code(err))
	require.Equal(t, uint64(4), p.stats().Traps)
	require.Equal(t, workerapi.StateRunning, list(t, r, p.ID).State)
}

func list(t *testing.T, r *rig, id string) workerapi.Status {
	t.Helper()
	all, err := r.List(t.Context())
	require.NoError(t, err)
	for _, s := range all {
		if s.ID == id {
			return s
		}
	}
	return workerapi.Status{}
}

// TestW3_MalformedMessages checks that invalid protobuf in any message yields INVALID_ARGUMENT with the field.
func TestW3_MalformedMessages(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.serve("greeter-c", func(s *workerapi.PodSpec) { s.Limits.MaxMessageBytes = 1000 })
	conn := p.overH2C()
	defer conn.Close()
	raw := grpc.ForceCodec(rawCodec{})
	var reply []byte
	err := conn.Invoke(t.Context(), "/greet.v1.Greeter/SayHello", []byte("\x0a\x02\xff\xff"), &reply, raw) // not UTF-8
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	require.ErrorContains(t, err, "name")
	err = conn.Invoke(t.Context(), "/greet.v1.Greeter/SayHello", []byte("\x0a\x20x"), &reply, raw) // truncated
	require.Equal(t, codes.InvalidArgument, status.Code(err))
	err = conn.Invoke(t.Context(), "/greet.v1.Greeter/SayHello", make([]byte, 1001), &reply, raw)
	require.Equal(t, codes.ResourceExhausted, status.Code(err))

	chat, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, "/greet.v1.Greeter/Chat", raw)
	require.NoError(t, err)
	require.NoError(t, chat.SendMsg([]byte("\x0a\x03Ada")))
	require.NoError(t, chat.RecvMsg(&reply))
	require.NoError(t, chat.SendMsg([]byte("\x0a\x02\xff\xff")))
	err = chat.RecvMsg(&reply)
	require.Equal(t, codes.InvalidArgument, status.Code(err), "%v", err)
}

// TestView checks that the guest sees its arguments, environment, peer, deadline and metadata.
func TestView(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.serve("faults-c", func(s *workerapi.PodSpec) {
		s.Args, s.Env = []string{"prog", "a b", ""}, []string{"A=1", "B=two words", "EMPTY="}
	})
	s := p.faults()
	ctx := metadata.AppendToOutgoingContext(withTimeout(t, time.Minute), "x-key", "v")
	v, err := s.call(ctx, "Inspect", `{}`)
	require.NoError(t, err)
	require.Equal(t, []any{"prog", "a b", ""}, v["args"])
	require.Equal(t, []any{"A=1", "B=two words", "EMPTY="}, v["env"])
	require.Equal(t, "/faults.v1.Faults/Inspect", v["method"])
	require.True(t, strings.HasPrefix(v["peer"].(string), "127.0.0.1:"), v["peer"])
	require.Equal(t, "v", v["metadata"].(map[string]any)["x-key"])
	require.NotEmpty(t, v["timeout"])
	require.NotContains(t, fmt.Sprint(v["metadata"]), "grpc-timeout")
}

func TestMounts(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	dir := t.TempDir()
	require.NoError(t, os.Chmod(filepath.Dir(dir), 0o700)) // the worker has no access to the parent
	require.NoError(t, os.Chmod(dir, 0o777))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), []byte("content"), 0o644))
	p := r.serve("faults-c", func(s *workerapi.PodSpec) {
		for _, m := range []workerapi.Mount{{Guest: "/rw"}, {Guest: "/ro", ReadOnly: true}} {
			d, err := os.OpenFile(dir, os.O_RDONLY, 0)
			require.NoError(t, err)
			m.Dir = workerapi.File{File: d}
			s.Mounts = append(s.Mounts, m)
		}
	})
	s := p.faults()
	for _, path := range []string{"/rw/file", "/ro/file"} {
		v := s.must("ReadFile", fmt.Sprintf(`{"path":%q}`, path))
		require.Equal(t, base64.StdEncoding.EncodeToString([]byte("content")), v["data"])
	}
	s.must("WriteFile", `{"path":"/rw/new","data":"bmV3"}`)
	written, err := os.ReadFile(filepath.Join(dir, "new"))
	require.NoError(t, err)
	require.Equal(t, "new", string(written))
	_, err = s.call(t.Context(), "WriteFile", `{"path":"/ro/other","data":"bmV3"}`)
	require.Error(t, err)
	_, err = s.call(t.Context(), "ReadFile", `{"path":"/rw/../../../etc/passwd"}`)
	require.Error(t, err)
	require.NoFileExists(t, filepath.Join(dir, "other"))
}

// TestBackPressure checks that a guest waits when its client does not read, and that the worker does not buffer its
// messages.
func TestBackPressure(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.serve("faults-c", func(s *workerapi.PodSpec) { s.Limits.RequestTimeout = 300 * time.Millisecond })
	s := p.faults()
	ctx, cancel := context.WithCancel(t.Context())
	tick := s.stream(ctx, "Tick")
	require.NoError(t, tick.send(`{"bytes":65536}`))
	require.NoError(t, tick.CloseSend())
	_, err := tick.receive()
	require.NoError(t, err)
	// Once the guest is blocked, its CPU time does not grow.
	var used uint64
	eventually(t, "the guest is blocked", func() bool {
		before := p.stats().CPUNanos
		time.Sleep(50 * time.Millisecond) // pacing: the interval of the measurement
		used = p.stats().CPUNanos
		return used == before && used > 0
	})
	require.Equal(t, 1, p.stats().Active)
	time.Sleep(500 * time.Millisecond) // pacing: longer than the request timeout, which excludes waiting
	for range 100 {
		_, err := tick.receive()
		require.NoError(t, err)
	}
	require.Greater(t, p.stats().CPUNanos, used)
	cancel()
	eventually(t, "the guest ends after its client has disconnected", func() bool { return p.stats().Instances == 0 })
}

// sleepUntilKilled makes a guest sleep for an hour, in a request with a short timeout.
func sleepUntilKilled(t *testing.T, s *service) (err error) {
	t.Helper()
	down := s.stream(withTimeout(t, 200*time.Millisecond), "Countdown")
	require.NoError(t, down.send(`{"from":1,"intervalMs":3600000}`))
	require.NoError(t, down.CloseSend())
	for err == nil {
		_, err = down.receive()
	}
	return err
}

// TestSleepersAreKilled checks that a sleeping guest ends with its request and leaves nothing behind, with and without
// directories.
func TestSleepersAreKilled(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	for name, p := range map[string]*pod{
		"no directory": r.serve("greeter-c"), "a directory": r.serve("greeter-c", mounted(t, t.TempDir())),
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, codes.DeadlineExceeded, status.Code(sleepUntilKilled(t, p.greeter())))
			eventually(t, "it is gone", func() bool { return p.stats().Instances == 0 })
		})
	}
}

// mounted adds a directory, /data, to a pod.
func mounted(t testing.TB, dir string) func(*workerapi.PodSpec) {
	return func(s *workerapi.PodSpec) {
		d, err := os.Open(dir)
		require.NoError(t, err)
		s.Mounts = []workerapi.Mount{{Guest: "/data", Dir: workerapi.File{File: d}}}
	}
}

func TestConcurrencyLimit(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.serve("faults-c", func(s *workerapi.PodSpec) { s.Limits.Concurrency = 2 })
	s := p.faults()
	var streams []*stream
	for range 2 {
		m := s.stream(t.Context(), "Mirror")
		require.NoError(t, m.send(`{"data":"AA=="}`))
		_, err := m.receive()
		require.NoError(t, err)
		streams = append(streams, m)
	}
	_, err := s.call(t.Context(), "Echo", `{}`)
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.NoError(t, r.Update(t.Context(), workerapi.Update{ID: p.ID, Limits: &workerapi.Limits{Concurrency: 3}}))
	s.must("Echo", `{}`)
	for _, m := range streams { // open streams continue
		require.NoError(t, m.send(`{"data":"AA=="}`))
		_, err := m.receive()
		require.NoError(t, err)
		require.NoError(t, m.CloseSend())
		_, err = m.receive()
		require.Equal(t, io.EOF, err)
	}
}

// TestMemoryOfThePod checks that the memory limit applies to all instances of a pod together.
func TestMemoryOfThePod(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.serve("faults-c", func(s *workerapi.PodSpec) { s.Resources.MemoryBytes = 48 << 20 })
	s := p.faults()
	s.must("Allocate", `{"value":"30000000"}`)
	hold := s.stream(t.Context(), "Mirror")
	require.NoError(t, hold.send(`{"data":"AA=="}`))
	_, err := hold.receive()
	require.NoError(t, err)
	var all sync.WaitGroup
	var exhausted, fine sync.Map
	for i := range 8 {
		all.Go(func() {
			_, err := s.call(t.Context(), "Allocate", `{"value":"30000000"}`)
			switch status.Code(err) {
			case codes.OK:
				fine.Store(i, true)
			case codes.ResourceExhausted:
				exhausted.Store(i, true)
			default:
				t.Error(err)
			}
		})
	}
	all.Wait()
	require.LessOrEqual(t, p.stats().PeakBytes, uint64(8*48<<20))
	require.NoError(t, r.Update(t.Context(), workerapi.Update{ID: p.ID, Resources: &workerapi.Resources{MemoryBytes: 8 << 20}}))
	_, err = s.call(t.Context(), "Allocate", `{"value":"30000000"}`)
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	require.NoError(t, r.Update(t.Context(), workerapi.Update{ID: p.ID, Resources: &workerapi.Resources{MemoryBytes: 256 << 20}}))
	s.must("Allocate", `{"value":"100000000"}`)
}

// TestCPUQuota checks that computing guests get no more than their CPU quota.
func TestCPUQuota(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.serve("faults-c", func(s *workerapi.PodSpec) {
		s.Resources.CPUQuota, s.Resources.CPUPeriod = 5_000, 100_000 // little enough to be reached on a busy machine
		s.Limits.RequestTimeout = time.Minute
	})
	s := p.faults()
	begun := time.Now()
	_, err := s.call(withTimeout(t, 2*time.Second), "Spin", `{}`)
	require.Equal(t, codes.DeadlineExceeded, status.Code(err))
	took := time.Since(begun)
	eventually(t, "the guest has ended", func() bool { return p.stats().Instances == 0 })
	used := time.Duration(p.stats().CPUNanos)
	require.Less(t, used, took*25/100, "the quota is a twentieth of a CPU, plus the delay of its enforcement")
	require.NotZero(t, used)
	require.NotZero(t, p.stats().ThrottledNanos)
}

func TestMetricsAndSpans(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{Spans: true})
	p := r.serve("greeter-c")
	s := p.greeter()
	s.must("SayHello", `{"name":"Ada"}`)
	_, err := s.call(t.Context(), "SayHello", `{}`)
	require.Error(t, err)
	m, err := r.Metrics(t.Context(), p.ID)
	require.NoError(t, err)
	require.Len(t, m, 1)
	require.Equal(t, "example.com:greeter-c@1.0.0", m[0].Component)
	var found bool
	for _, method := range m[0].Methods {
		if method.Procedure == "/greet.v1.Greeter/SayHello" {
			found = true
			require.Equal(t, map[string]uint64{"OK": 1, "INVALID_ARGUMENT": 1}, method.Codes)
			var n uint64
			for _, c := range method.Buckets {
				n += c
			}
			require.Equal(t, uint64(2), n)
			require.Len(t, method.Buckets, len(method.Bounds)+1)
			require.NotZero(t, method.Seconds)
		}
	}
	require.True(t, found)
	for e := range r.Events() {
		if e.Spans != nil {
			require.Contains(t, string(e.Spans), "greet.v1.Greeter/SayHello")
			require.Contains(t, string(e.Spans), "example.com:greeter-c@1.0.0")
			return
		}
	}
	t.Fatal("no spans were sent")
}

// rawCodec sends and receives bytes unchanged.
type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(v any) ([]byte, error) { return v.([]byte), nil }

func (rawCodec) Unmarshal(data []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}
