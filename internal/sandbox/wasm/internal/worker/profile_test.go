package worker

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// TestProfile looks at the first and the second call of instances. Other calls go on.
func TestProfile(t *testing.T) {
	for nth := range 3 {
		s := snapshotServer(t, "", workerapi.Limits{Reuse: nth == 2, ReuseRequests: max(nth, 1)})
		w, id := s.pod.worker, s.pod.spec.ID
		asked(t, s)
		_, err := w.Profile(t.Context(), id, nth)
		require.NoError(t, err)
		ended := 0
		for range 500 {
			if s.Invoke(t.Context(), s.methodOf(t, "/sum.v1.Sums/Add"), &streamCall{one: true}) != nil {
				ended++
			}
		}
		p, err := w.Profile(t.Context(), id, 0)
		require.NoError(t, err)
		if nth == 0 {
			require.Zero(t, ended)
			require.Empty(t, p.Samples)
			continue
		}
		require.Positive(t, p.Typical)
		samples := 0
		for functions, n := range p.Samples {
			require.Contains(t, strings.Split(functions, workerapi.Inside)[0], "wasm function")
			samples += n
		}
		require.Positive(t, samples)
		require.LessOrEqual(t, samples, ended)
		asked(t, s)
	}
}
