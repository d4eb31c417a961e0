package program

import (
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// TestJavaScriptWithManyParameters checks that a streaming function with more than 16 core parameters returns its
// borrowed stream in time (examples/wasm/tools/borrows.mjs).
func TestJavaScriptWithManyParameters(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	watch := r.serve("wide-js").wide().stream(t.Context(), "Watch")
	require.NoError(t, watch.send(`{"a":"1","b":"2","c":"3","d":"4","e":"5","n":6}`))
	require.NoError(t, watch.CloseSend())
	for _, text := range []string{"1", "2", "3", "4", "5"} {
		m, err := watch.receive()
		require.NoError(t, err)
		require.Equal(t, map[string]any{"text": text, "n": "6"}, m)
	}
	_, err := watch.receive()
	require.Equal(t, io.EOF, err)
}

// TestJavaScriptWaits checks timeouts of a waiting guest: waiting does not count towards request-timeout, so a call can
// last until its client's deadline. Without a deadline it lasts at most request-timeout. A cancelled call ends
// immediately.
func TestJavaScriptWaits(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	p := r.serve("wide-js", func(s *workerapi.PodSpec) { s.Limits.RequestTimeout = 500 * time.Millisecond })
	s := p.wide()
	m, err := s.call(withTimeout(t, time.Minute), "Wait", `{"a":"waited","n":1500}`)
	require.NoError(t, err)
	require.Equal(t, "waited", m["text"])
	_, err = s.call(t.Context(), "Wait", `{"n":3600000}`)
	require.Equal(t, codes.DeadlineExceeded, status.Code(err), "%v", err)
	_, err = s.call(withTimeout(t, 300*time.Millisecond), "Wait", `{"n":3600000}`)
	require.Equal(t, codes.DeadlineExceeded, status.Code(err), "%v", err)
	eventually(t, "the guests are gone", func() bool {
		s := p.stats()
		s.Holdings.HostBytes = 0 // a memory waits for the next request
		return s.Instances == 0 && s.Holdings == workerapi.Holdings{}
	})
}
