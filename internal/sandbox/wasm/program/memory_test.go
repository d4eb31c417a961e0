package program

import (
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

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
			waiting := 0 // memories for the next requests, which a pod gives back after a minute without one
			for range pods {
				p := r.serve(example)
				s := p.greeter()
				s.must("SayHello", `{"name":"Ada"}`)
				s.conn.Close()
				waiting += int(p.stats().Holdings.HostBytes)
			}
			each := (r.resident() - before - waiting) / pods
			t.Logf("%d KiB for each of %d pods, besides %d KiB that wait for a request", each>>10, pods, waiting/pods>>10)
			require.Less(t, each, 1<<20) // includes the race detector's shadow memory; a tenth without it
		})
	}
}

// TestWorkerKeepsMemories checks that a worker without privileges finds the pages that a guest has changed: the memory of an
// instance that began from a snapshot waits for the next one. Nevertheless, no other process of its user may trace it.
func TestWorkerKeepsMemories(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	if strings.Contains(r.logText(), "changed pages cannot be found") {
		t.Skip("the kernel has no PAGEMAP_SCAN (Linux 6.7)")
	}
	p := r.serve("snapshot")
	conn := p.overH2C()
	defer conn.Close()
	for range 10 {
		var reply []byte
		require.NoError(t, conn.Invoke(t.Context(), "/sum.v1.Sums/Add", []byte{}, &reply, grpc.ForceCodec(rawCodec{})))
		require.Contains(t, string(reply), "1 initialized, 0 requests, ")
	}
	eventually(t, "memory waits for the next instance", func() bool {
		s := p.stats()
		return s.Instances == 0 && s.Snapshot.Bytes > 0 && s.Holdings.HostBytes > s.Snapshot.Bytes
	})
	var own syscall.Stat_t
	require.NoError(t, syscall.Stat(fmt.Sprintf("/proc/%d/environ", r.process.Pid), &own))
	require.Zero(t, own.Uid, "the worker is dumpable")
}
