package program

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// TestFaultW7HostDescriptors covers rows W1 and W7 of docs/faults.md for the worker's descriptors. Guests open files
// until EMFILE at their pod's limit, and sleep. Together they leave the worker half of its descriptors, and one of them
// leaves the others three quarters of the other half: neighbours still accept connections and new pods start. Finally
// all descriptors are closed.
func TestFaultW7HostDescriptors(t *testing.T) {
	const limit = 600
	r := startWorker(t, workerapi.WorkerConfig{}, fmt.Sprintf("%s=%d", openFiles, limit))
	command := workerapi.Code{Digest: "sha256:opener",
		Image: workerapi.File{File: codeFile(t, "../../../component/engine/testdata/command.wasm")}}
	_, err := r.Load(t.Context(), command)
	require.NoError(t, err)
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "f"), nil, 0o644))
	opener := func(most int64) *pod {
		return r.command(func(s *workerapi.PodSpec) {
			mounted(t, dir)(s)
			s.Digest, s.Holdings.Files = command.Digest, most
		}, "hold", "/data/f", "1000000", "600")
	}
	neighbour := r.serve("greeter-c")
	neighbour.greeter().must("SayHello", `{"name":"Ada"}`)
	descriptors := func() int {
		list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", r.process.Pid))
		require.NoError(t, err)
		return len(list)
	}
	before := descriptors()

	openers := []*pod{opener(50)}
	eventually(t, "the opener has reached its own limit", func() bool {
		return strings.Contains(openers[0].logged("stdout"), "49: No file descriptors available\n") // the directory is the 50th
	})
	require.EqualValues(t, 50, openers[0].stats().Holdings.Files)
	second := opener(0)
	eventually(t, "the second opener has reached the limit of one pod", func() bool { return second.stats().Holdings.Files == limit/8 })
	openers = append(openers, second, opener(0), opener(0), opener(0))
	eventually(t, "the openers have reached the limit of all pods", func() bool {
		var files int64
		met := true
		for _, p := range openers {
			files += p.stats().Holdings.Files
			met = met && strings.Contains(p.logged("stdout"), "No file descriptors available\n")
		}
		return files == limit/2 && met
	})
	require.EqualValues(t, limit/8, second.stats().Holdings.Files)
	require.Less(t, descriptors(), limit*3/4)
	for range 20 {
		neighbour.greeter().must("SayHello", `{"name":"Ada"}`) // over a new connection
	}
	r.serve("greeter-c").greeter().must("SayHello", `{"name":"Bob"}`)
	_, err = r.tryCommand(func(s *workerapi.PodSpec) { mounted(t, dir)(s); s.Digest = command.Digest }, "env", "A")
	require.True(t, errdefs.IsResourceExhausted(err), "start of a pod with a directory at the limit: %v", err)

	for _, p := range openers {
		_, err := r.Stop(t.Context(), p.ID, 0)
		require.NoError(t, err)
		require.Zero(t, p.stats().Holdings)
	}
	eventually(t, "the descriptors are closed", func() bool { return descriptors() < before+40 }) // 40 for the new pod and connections
	end := r.command(func(s *workerapi.PodSpec) { mounted(t, dir)(s); s.Digest = command.Digest }, "read", "/data/f").exit()
	require.Zero(t, end.ExitCode, end.Message)
}
