package dataplane

import (
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

// socketMemory returns the kernel's memory for TCP and UDP sockets, in bytes (/proc/net/sockstat).
func socketMemory(t testing.TB) int {
	t.Helper()
	b, err := os.ReadFile("/proc/net/sockstat")
	if err != nil {
		t.Fatal(err)
	}
	pages := 0
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(line)
		for i, f := range fields {
			if f == "mem" {
				n, err := strconv.Atoi(fields[i+1])
				if err != nil {
					t.Fatal(err)
				}
				pages += n
			}
		}
	}
	return pages * os.Getpagesize()
}

// alone is set in a process that runs only TestIdleServerMemory.
const alone = "DATAPLANE_TEST_ALONE"

// TestIdleServerMemory checks that an idle pod's part of the data plane, three sockets and a gRPC handler, uses at most
// 64 KiB of the megabyte allowed for a pod, and at most 256 KiB after requests.
func TestIdleServerMemory(t *testing.T) {
	if os.Getenv(alone) == "" { // the memory of other tests would be counted
		c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestIdleServerMemory$", "-test.v")
		c.Env = append(os.Environ(), alone+"=1")
		out, err := c.CombinedOutput()
		t.Logf("%s", out)
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	const n = 200
	startServer(t, &echo{}).checkCall(t) // warm-up: allocations once per process
	servers := make([]*testServer, n)
	before, goroutines, kernel := heap(), runtime.NumGoroutine(), socketMemory(t)
	for i := range servers {
		servers[i] = startServer(t, &echo{})
	}
	idle := (heap() - before) / n
	t.Logf("idle: %d KiB of heap and stacks, %d goroutines, %d bytes of socket buffers each",
		idle/1024, (runtime.NumGoroutine()-goroutines)/n, (socketMemory(t)-kernel)/n)
	if idle > 64<<10 {
		t.Errorf("memory of an idle server = %d bytes, want at most 64 KiB", idle)
	}
	for _, s := range servers {
		s.checkCall(t)
		s.checkGet(t)
	}
	eventually(t, "all connections are closed", func() bool {
		open := 0
		for _, s := range servers {
			stats := s.Stats()
			open += stats.Connections + stats.QUICConnections
		}
		return open == 0
	})
	used := (heap() - before) / n
	t.Logf("after requests of each kind: %d KiB", used/1024)
	// quic-go allocates queues of 1 024 packets at the first packet.
	if used > 256<<10 {
		t.Errorf("memory of an idle server after requests = %d bytes, want at most 256 KiB", used)
	}
	runtime.KeepAlive(servers)
}
