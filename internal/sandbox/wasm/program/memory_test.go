package program

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

var rss = regexp.MustCompile(`VmRSS:\s+(\d+) kB`)

// resident returns the worker's resident memory, in bytes.
func (r *rig) resident() int {
	r.t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.process.Pid))
	require.NoError(r.t, err)
	m := rss.FindSubmatch(text)
	require.NotNil(r.t, m)
	kib, err := strconv.Atoi(string(m[1]))
	require.NoError(r.t, err)
	return kib << 10
}

// TestIdlePodsAreSmall checks that an idle pod that has served requests uses much less than a megabyte in the worker.
func TestIdlePodsAreSmall(t *testing.T) {
	for _, example := range []string{"greeter-c", "greeter-js"} {
		t.Run(example, func(t *testing.T) {
			r := startWorker(t, workerapi.WorkerConfig{})
			r.serve(example).greeter().must("SayHello", `{"name":"Ada"}`)
			before := r.resident()
			const pods = 100
			for range pods {
				p := r.serve(example)
				s := p.greeter()
				s.must("SayHello", `{"name":"Ada"}`)
				s.conn.Close()
			}
			each := (r.resident() - before) / pods
			t.Logf("%d KiB for each of %d pods", each>>10, pods)
			require.Less(t, each, 1<<20) // includes the race detector's shadow memory; a tenth without it
		})
	}
}
