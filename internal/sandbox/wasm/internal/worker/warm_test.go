package worker

import (
	"bytes"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// TestWarm checks that requests begin after the warm-up, and that one that does what it must not do is undone: requests
// begin before it, and the pod says why.
func TestWarm(t *testing.T) {
	for do, want := range map[string]string{
		"": "", "monotonic": "", "renew": "",
		"random": "random values", "clock": "time of day", "file": "reads files", "open-file": "opened or closed descriptors",
		"close": "opened or closed descriptors", "error": "not today", "bad-result": "canonical ABI", "trap": "unreachable",
		"exit": "exited with code 3", "call": "tripod:grpc/raw@0.1.0#receive", "fill": "limit 64 MiB", "sparse": "of data within",
	} {
		t.Run(do, func(t *testing.T) {
			s := warmServer(t, "", do, workerapi.Limits{RequestTimeout: time.Hour})
			s.pod.snapshots.patience = soon
			warmed := map[bool]string{true: "1 warmed", false: "0 warmed"}[want == ""]
			for range 3 {
				answer := asked(t, s)
				require.Contains(t, answer, "1 initialized, 0 requests, ")
				require.Contains(t, answer, warmed)
			}
			state := s.pod.snapshots.state()
			require.Positive(t, state.Bytes)
			require.Contains(t, state.Reason, want)
			require.Equal(t, want == "", state.Reason == "", state.Reason)
			require.Zero(t, s.pod.account.Instances())
		})
	}
	s := warmServer(t, "", "clock", workerapi.Limits{Snapshot: workerapi.SnapshotAlways})
	require.Contains(t, asked(t, s), "1 warmed", "the pod's owner says so")
}

// renamed returns a copy of a guest in which a name is another one of the same length.
func renamed(t *testing.T, guest, from, to string) string {
	t.Helper()
	binary, err := os.ReadFile(guest)
	require.NoError(t, err)
	require.Contains(t, string(binary), from)
	file := filepath.Join(t.TempDir(), "renamed.wasm")
	require.NoError(t, os.WriteFile(file, bytes.ReplaceAll(binary, []byte(from), []byte(to)), 0o600))
	return file
}

// TestWarmAlone checks that a guest can have a warm-up without a function that prepares its snapshot, as one that was
// initialized when it was built.
func TestWarmAlone(t *testing.T) {
	guest := renamed(t, "testdata/snapshot.wasm", "#prepare", "#not-now")
	for env, want := range map[string]string{"": "", "WARM=call": "tripod:grpc/raw@0.1.0#receive", "WARM=clock": "time of day",
		"START=clock": "time of day"} {
		s := serverOf(t, guest, workerapi.Limits{RequestTimeout: time.Hour}, env)
		warmed := map[bool]string{true: "1 warmed", false: "0 warmed"}[want == ""]
		for range 3 {
			answer := asked(t, s)
			require.Contains(t, answer, "0 initialized, 0 requests, ") // it counts prepare
			require.Contains(t, answer, warmed)
		}
		state := s.pod.snapshots.state()
		require.Contains(t, state.Reason, want)
		require.Equal(t, want == "", state.Reason == "", state.Reason)
		require.Equal(t, want == "", state.Bytes > 0, "a snapshot")
		require.Positive(t, s.pod.account.Held(engine.HeldBytes), "its memory is kept")
	}
}

// TestWarmJavaScript checks that a component of several core modules, which calls the host for its environment in its warm-up,
// begins after it.
func TestWarmJavaScript(t *testing.T) {
	spec := workerapi.PodSpec{Env: []string{"POD_NAME=ours"}}
	s := newServingOn(t, channelEngine(), examples+"greeter-js/greeter-js.wasm", examples+"greeter/greeter.proto", spec)
	for range 3 {
		c := &oneCall{request: []byte("\x0a\x03Ada"), header: http.Header{}, trailer: http.Header{}}
		require.NoError(t, s.Invoke(t.Context(), s.methodOf(t, "/greet.v1.Greeter/SayHello"), c))
		require.Contains(t, string(c.reply), "ours")
		state := s.pod.snapshots.state()
		require.Empty(t, state.Reason)
		require.Positive(t, state.Bytes)
	}
}

// TestWarmIsPatient checks that a warm-up that does not end, or needs all memory, costs a part of a few requests.
func TestWarmIsPatient(t *testing.T) {
	for do, why := range map[string]string{"loop": "takes longer than", "memory": "out of memory"} {
		s := warmServer(t, "", do, workerapi.Limits{RequestTimeout: time.Minute})
		s.pod.snapshots.patience = map[string]time.Duration{"loop": 50 * time.Millisecond, "memory": soon}[do]
		for range snapshotAttempts - 1 {
			s.pod.snapshots.retry = time.Time{}
			require.Contains(t, asked(t, s), "0 initialized", do)
		}
		s.pod.snapshots.retry, s.pod.snapshots.patience = time.Time{}, soon
		if do == "loop" {
			s.pod.snapshots.patience = 2 * time.Second // for the loop, and then for the snapshot without it
		}
		require.Contains(t, asked(t, s), "1 initialized", do)
		require.Contains(t, asked(t, s), "0 warmed", do)
		require.Contains(t, s.pod.snapshots.state().Reason, why)
		require.Zero(t, s.pod.account.Instances())
	}
}
