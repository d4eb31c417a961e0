package worker

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/test/guestbuild"
)

// snapshotServer starts a pod with the guest testdata/snapshot.c, whose initialization does what the argument says.
func snapshotServer(t *testing.T, do string, limits workerapi.Limits) *server {
	t.Helper()
	return warmServer(t, do, "", limits)
}

// warmServer starts a pod with the guest testdata/snapshot.c, whose initialization and warm-up do what the arguments say.
func warmServer(t *testing.T, do, warm string, limits workerapi.Limits) *server {
	t.Helper()
	return serverOf(t, "testdata/snapshot.wasm", limits, "DO="+do, "WARM="+warm)
}

func serverOf(t *testing.T, guest string, limits workerapi.Limits, env ...string) *server {
	t.Helper()
	spec := workerapi.PodSpec{Limits: limits, Env: env, Resources: workerapi.Resources{MemoryBytes: 256 << 20}}
	if strings.Contains(strings.Join(env, ""), "file") {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), nil, 0o600))
		opened, err := os.Open(dir)
		require.NoError(t, err)
		spec.Mounts = []workerapi.Mount{{Guest: "/data", Dir: workerapi.File{File: opened}}}
	}
	return newServingOn(t, channelEngine(), guest, sumProto, spec)
}

// asked sends a request and returns the guest's answer.
func asked(t *testing.T, s *server) string {
	t.Helper()
	c := &streamCall{one: true}
	require.NoError(t, s.Invoke(t.Context(), s.methodOf(t, "/sum.v1.Sums/Add"), c))
	require.Len(t, c.sent, 1)
	return string(c.sent[0])
}

// TestSnapshot checks that the first request initializes the guest for all others, and that each one begins in the state
// after the initialization.
func TestSnapshot(t *testing.T) {
	for _, do := range []string{"", "monotonic", "renew"} {
		s := snapshotServer(t, do, workerapi.Limits{})
		require.Zero(t, s.pod.snapshots.state(), "before the first request")
		seen := map[string]bool{}
		for range 20 {
			answer := asked(t, s)
			require.True(t, strings.HasPrefix(answer, "1 initialized, 0 requests, "), answer)
			seen[answer] = true
		}
		if want := map[string]int{"renew": 20}[do]; len(seen) != max(want, 1) {
			t.Errorf("%q: %d different answers; want %d", do, len(seen), max(want, 1))
		}
		state := s.pod.snapshots.state()
		require.Empty(t, state.Reason)
		require.Positive(t, state.Bytes)
		held := s.pod.account.Held(engine.HeldBytes)
		require.GreaterOrEqual(t, held, state.Bytes, "it counts for the pod")
		require.Less(t, held, state.Bytes+100<<10, "as do the pages that wait for the next instance")
		require.Zero(t, s.pod.account.Instances())
	}
}

// TestSnapshotRefused checks that a guest whose state is more than its memory, or that has seen during its initialization
// what each request must see for itself, is initialized for each request, and that the pod says why.
// TestSnapshotBeforeTheFirstRequest: pods have their snapshots when they have started, but only some that nobody has called.
func TestSnapshotBeforeTheFirstRequest(t *testing.T) {
	w := New(Config{Engine: channelEngine(), Logger: slog.New(slog.DiscardHandler), Publish: func(workerapi.Event) {}, Unasked: 1})
	t.Cleanup(w.Close)
	loadServer(t, w, "testdata/snapshot.wasm", sumProto, CompileOptions())
	start := func(id, do string) *server {
		t.Helper()
		s := startServer(t, w, workerapi.PodSpec{ID: id, Env: []string{"DO=" + do}})
		s.pod.preparing.Wait()
		return s
	}
	first := start("first", "monotonic")
	require.Positive(t, first.pod.snapshots.state().Bytes)
	require.Zero(t, first.pod.account.Instances())
	second := start("second", "monotonic")
	require.Zero(t, second.pod.snapshots.state().Bytes, "another pod waits for its first request")

	made := first.pod.snapshots.current
	require.True(t, strings.HasPrefix(asked(t, first), "1 initialized, 0 requests, "))
	require.Same(t, made, first.pod.snapshots.current, "the first request begins in it")
	third := start("third", "monotonic")
	require.Positive(t, third.pod.snapshots.state().Bytes, "the first pod has had its request")
	third.pod.snapshots.used = time.Now().Add(-snapshotIdle)
	third.pod.snapshots.expire()
	require.Zero(t, third.pod.snapshots.state().Bytes)
	small := startServer(t, w, workerapi.PodSpec{ID: "small", Env: []string{"DO=monotonic"}, Resources: workerapi.Resources{
		MemoryBytes: int64(3 * third.pod.account.MemoryPeak())}})
	small.pod.preparing.Wait()
	require.Zero(t, small.pod.snapshots.state().Bytes, "its requests need the memory")
	refused := start("refused", "clock")
	require.NotEmpty(t, refused.pod.snapshots.state().Reason)
	require.True(t, w.unasked.TryAcquire(1), "pods without a snapshot do not count")
}

func TestSnapshotRefused(t *testing.T) {
	for do, c := range map[string]struct {
		why    string
		always bool // it can have a snapshot if the pod's owner says so
	}{
		"random":     {"random values", true},
		"clock":      {"time of day", true},
		"file":       {"reads files", true},
		"open-file":  {"opened or closed descriptors", false},
		"close":      {"opened or closed descriptors", false},
		"error":      {"not today", false},
		"bad-result": {"canonical ABI", false},
		"trap":       {"unreachable", false},
		"exit":       {"exited with code 3", false},
		"call":       {"tripod:grpc/raw@0.1.0#receive", false},
		"memory":     {"out of memory", false},
		"fill":       {"limit 64 MiB", false},
		"sparse":     {"of data within", false},
	} {
		for _, mode := range []workerapi.SnapshotMode{workerapi.SnapshotAuto, workerapi.SnapshotAlways} {
			t.Run(do+string(mode), func(t *testing.T) {
				s := snapshotServer(t, do, workerapi.Limits{Snapshot: mode, RequestTimeout: time.Hour})
				s.pod.snapshots.patience = soon
				for range 3 {
					require.Contains(t, asked(t, s), "initialized, 0 requests, ")
				}
				state := s.pod.snapshots.state()
				if c.always && mode == workerapi.SnapshotAlways {
					require.Empty(t, state.Reason)
					require.Positive(t, state.Bytes)
					return
				}
				require.Contains(t, state.Reason, c.why)
				require.Zero(t, state.Bytes)
				require.Zero(t, s.pod.account.Held(engine.HeldBytes))
				require.Zero(t, s.pod.account.Instances())
			})
		}
	}
}

// TestSnapshotIsPatient checks that an initialization that does not end costs a part of a few requests, and no more.
func TestSnapshotIsPatient(t *testing.T) {
	s := snapshotServer(t, "loop", workerapi.Limits{RequestTimeout: time.Minute})
	s.pod.snapshots.patience = 50 * time.Millisecond
	for n := range snapshotAttempts + 1 {
		require.Equal(t, n == snapshotAttempts, s.pod.snapshots.final)
		s.pod.snapshots.retry = time.Time{}
		require.Contains(t, asked(t, s), "0 initialized")
	}
	require.Contains(t, s.pod.snapshots.state().Reason, "takes longer than 50ms")
	require.Zero(t, s.pod.account.Instances())
}

// TestSnapshotNever checks that a pod can do without, and that a guest without the export has none.
func TestSnapshotNever(t *testing.T) {
	s := snapshotServer(t, "", workerapi.Limits{Snapshot: workerapi.SnapshotNever})
	require.Contains(t, asked(t, s), "0 initialized")
	require.Zero(t, s.pod.snapshots.state())
	s = rawServer(t, examples+"raw-c/raw-c.wasm", workerapi.Limits{}, 0)
	require.Contains(t, s.pod.snapshots.state().Reason, "does not export tripod:grpc/snapshot")
}

// TestSnapshotIsBounded checks that a snapshot counts as memory that the worker holds for the pod.
func TestSnapshotIsBounded(t *testing.T) {
	s := snapshotServer(t, "", workerapi.Limits{})
	s.pod.account.Bound(engine.HeldBytes, 1000)
	require.Contains(t, asked(t, s), "1 initialized")
	require.Contains(t, s.pod.snapshots.state().Reason, "hold for the pod")
	require.Zero(t, s.pod.account.Held(engine.HeldBytes))
	require.Contains(t, asked(t, s), "0 initialized", "without another attempt at once")
}

// TestSnapshotsOneByOne checks that a pod waits until its worker has made the snapshot of another one.
func TestSnapshotsOneByOne(t *testing.T) {
	s := snapshotServer(t, "", workerapi.Limits{RequestTimeout: time.Hour})
	s.pod.snapshots.patience = soon
	require.True(t, s.pod.worker.capturing.TryAcquire(1))
	answered := make(chan string, 1)
	go func() {
		c := &streamCall{one: true}
		if err := s.Invoke(t.Context(), s.methodOf(t, "/sum.v1.Sums/Add"), c); err != nil {
			t.Error(err)
		}
		answered <- string(bytes.Join(c.sent, nil))
	}()
	select {
	case answer := <-answered:
		t.Fatalf("answered while another snapshot was made: %s", answer)
	case <-time.After(100 * time.Millisecond):
		require.Zero(t, s.pod.snapshots.state().Bytes)
	}
	s.pod.worker.capturing.Release(1)
	require.Contains(t, <-answered, "1 initialized")
	require.Positive(t, s.pod.snapshots.state().Bytes)
	require.True(t, s.pod.worker.capturing.TryAcquire(1), "the next one can begin")
}

// TestSnapshotWithoutMemory checks that a pod whose other instances use its memory gets a snapshot later, but does not try
// forever.
func TestSnapshotWithoutMemory(t *testing.T) {
	s := snapshotServer(t, "memory", workerapi.Limits{RequestTimeout: time.Hour})
	s.pod.snapshots.patience = soon
	for n := range snapshotAttempts + 1 {
		require.Equal(t, n == snapshotAttempts, s.pod.snapshots.final)
		s.pod.snapshots.retry = time.Time{}
		require.Contains(t, asked(t, s), "0 initialized")
	}
	require.Contains(t, s.pod.snapshots.state().Reason, "out of memory")
}

// TestSnapshotOfImpatientClient checks that a client that gives up during the initialization does not decide for others.
func TestSnapshotOfImpatientClient(t *testing.T) {
	s := snapshotServer(t, "loop", workerapi.Limits{RequestTimeout: time.Minute})
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	code, text := codeOf(s.Invoke(ctx, s.methodOf(t, "/sum.v1.Sums/Add"), &streamCall{one: true}))
	require.Equal(t, codes.Canceled, code, text)
	require.False(t, s.pod.snapshots.final)
	require.NotEmpty(t, s.pod.snapshots.state().Reason)
	require.Contains(t, asked(t, s), "0 initialized", "the next request does not wait for another attempt")
}

// TestSnapshotOfManyRequests checks that requests at the same time share one snapshot and never each other's memory, also
// while the snapshot is discarded and made again, and that nothing remains of it at the end of the pod.
func TestSnapshotOfManyRequests(t *testing.T) {
	s := snapshotServer(t, "renew", workerapi.Limits{})
	var wg sync.WaitGroup
	var mu sync.Mutex
	seen := map[string]int{}
	for range 8 {
		wg.Go(func() {
			for range 25 {
				c := &streamCall{one: true}
				if err := s.Invoke(t.Context(), s.methodOf(t, "/sum.v1.Sums/Add"), c); err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				seen[string(c.sent[0])]++
				mu.Unlock()
			}
		})
	}
	wg.Go(func() {
		for range 50 {
			s.pod.snapshots.mu.Lock()
			s.pod.snapshots.used = time.Now().Add(-snapshotIdle)
			s.pod.snapshots.mu.Unlock()
			s.pod.snapshots.expire()
		}
	})
	wg.Wait()
	for answer, n := range seen {
		if !strings.Contains(answer, "initialized, 0 requests") {
			t.Errorf("a request saw another one: %s", answer)
		}
		if strings.HasPrefix(answer, "1 initialized") && n > 1 {
			t.Errorf("%d requests share a random value: %s", n, answer)
		}
	}
	asked(t, s)
	s.pod.stop(0)
	<-s.pod.done
	require.Zero(t, s.pod.account.Held(engine.HeldBytes))
	current, mustMake := s.pod.snapshots.get(workerapi.SnapshotAuto)
	require.Nil(t, current)
	require.False(t, mustMake)
}

// TestSnapshotExpires checks that a pod without requests gives its snapshot back.
func TestSnapshotExpires(t *testing.T) {
	s := snapshotServer(t, "", workerapi.Limits{})
	asked(t, s)
	s.pod.snapshots.expire()
	require.NotZero(t, s.pod.snapshots.state().Bytes, "it has just been used")
	s.pod.snapshots.mu.Lock()
	s.pod.snapshots.used = time.Now().Add(-snapshotIdle)
	s.pod.snapshots.mu.Unlock()
	s.pod.snapshots.expire()
	require.Zero(t, s.pod.snapshots.state())
	require.Zero(t, s.pod.account.Held(engine.HeldBytes))
	require.Contains(t, asked(t, s), fmt.Sprintf("%d initialized", 1), "it is made again")
}

// TestInitialMemories checks that the memories of guests without snapshots are kept for the next requests, at the expense of
// their pod, until it is idle or ends, and not if the pod wants none.
func TestInitialMemories(t *testing.T) {
	var uts unix.Utsname
	require.NoError(t, unix.Uname(&uts))
	var major, minor int
	_, err := fmt.Sscanf(unix.ByteSliceToString(uts.Release[:]), "%d.%d", &major, &minor)
	require.NoError(t, err)
	if major < 6 || major == 6 && minor < 7 {
		t.Skip("the kernel has no PAGEMAP_SCAN (Linux 6.7), so no memory waits with pages of its own")
	}
	several := renamed(t, examples+"greeter-js/greeter-js.wasm", "tripod:grpc/warm@", "tripod:grpc/cold@")
	for name, guest := range map[string]string{"several modules": several, "one": examples + "greeter-c/greeter-c.wasm"} {
		s := newServingOn(t, channelEngine(), guest, examples+"greeter/greeter.proto", workerapi.PodSpec{})
		ask := func() {
			t.Helper()
			call := &oneCall{request: []byte("\x0a\x03Ada"), header: http.Header{}, trailer: http.Header{}}
			require.NoError(t, s.Invoke(t.Context(), s.methodOf(t, "/greet.v1.Greeter/SayHello"), call))
			require.Contains(t, string(call.reply), "Ada")
		}
		for range 3 {
			ask()
		}
		require.Positive(t, s.pod.account.Held(engine.HeldBytes), name)
		require.Zero(t, s.pod.snapshots.state().Bytes, "it is no snapshot")
		require.NotEmpty(t, s.pod.snapshots.state().Reason)
		if guest == several {
			require.Contains(t, s.pod.snapshots.state().Reason, wasmbin.ComponentizeQJS+" initialized the guest")
		}
		s.pod.snapshots.mu.Lock()
		s.pod.snapshots.used = time.Now().Add(-snapshotIdle)
		s.pod.snapshots.mu.Unlock()
		s.pod.snapshots.expire()
		require.Zero(t, s.pod.account.Held(engine.HeldBytes), "the pod is idle")
		limits := *s.limits.Load()
		limits.Snapshot = workerapi.SnapshotNever
		s.limits.Store(&limits)
		ask()
		require.Zero(t, s.pod.account.Held(engine.HeldBytes))
		limits.Snapshot = workerapi.SnapshotAuto
		s.limits.Store(&limits)
		ask()
		require.Positive(t, s.pod.account.Held(engine.HeldBytes))
		s.pod.stop(0)
		<-s.pod.done
		require.Zero(t, s.pod.account.Held(engine.HeldBytes), "the pod has ended")
	}
}

// TestReuseIsBounded checks that an instance ends after its number of requests, and at its age even while it is idle.
func TestReuseIsBounded(t *testing.T) {
	s := snapshotServer(t, "", workerapi.Limits{Reuse: true, ReuseRequests: 3})
	for n := range 9 {
		require.Contains(t, asked(t, s), fmt.Sprintf("%d requests", n%3))
	}
	require.Zero(t, s.pod.account.Instances())
	s = snapshotServer(t, "", workerapi.Limits{Reuse: true, ReuseAge: 50 * time.Millisecond})
	asked(t, s)
	require.Eventually(t, func() bool { return s.pod.account.Instances() == 0 }, soon, time.Millisecond)
	require.Contains(t, asked(t, s), "0 requests", "a fresh one")
	_, err := s.pod.worker.Start(t.Context(), workerapi.PodSpec{ID: "other", Digest: "d", Limits: workerapi.Limits{ReuseAge: -1}})
	require.ErrorContains(t, err, "negative limits")
}

// BenchmarkSnapshot measures a unary call of a server in Go without the network: with a fresh instance that is
// initialized, with one that begins from the pod's snapshot, and with one that is reused.
func BenchmarkSnapshot(b *testing.B) {
	wasm := guestbuild.Wasm(b, examples+"greeter-go", ".")
	s := newServingOn(b, channelEngine(), wasm, examples+"greeter/greeter.proto", workerapi.PodSpec{})
	method := s.methodOf(b, "/greet.v1.Greeter/SayHello")
	for _, limits := range []workerapi.Limits{{Snapshot: workerapi.SnapshotNever}, {}, {Reuse: true}} {
		name := map[bool]string{true: "reused"}[limits.Reuse] + string(limits.Snapshot)
		b.Run(cmp.Or(name, "snapshot"), func(b *testing.B) {
			require.NoError(b, fillLimits(&limits))
			s.limits.Store(&limits)
			invoke := func() error {
				return s.Invoke(context.Background(), method, &streamCall{messages: [][]byte{[]byte("\x0a\x03Ada")}, one: true})
			}
			b.Run("one", func(b *testing.B) {
				reportUsage(b, func() {
					for b.Loop() {
						if err := invoke(); err != nil {
							b.Fatal(err)
						}
					}
				})
			})
			b.Run("parallel", func(b *testing.B) {
				b.SetParallelism(16)
				reportUsage(b, func() {
					b.RunParallel(func(pb *testing.PB) {
						for pb.Next() {
							if err := invoke(); err != nil {
								b.Error(err)
								return
							}
						}
					})
				})
			})
		})
	}
	require.Empty(b, s.pod.snapshots.state().Reason)
}
