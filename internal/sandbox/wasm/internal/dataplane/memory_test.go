package dataplane

import (
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

// socketMemory is what the kernel has given to sockets of TCP and UDP, in bytes (/proc/net/sockstat).
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

// alone says that the process runs one test and no more.
const alone = "DATAPLANE_TEST_ALONE"

// TestIdleServerMemory holds an idle pod's share of the data plane, three sockets and a gRPC handler, to 64 KiB: a pod
// may cost a megabyte altogether. It also says what the first requests add.
func TestIdleServerMemory(t *testing.T) {
	if os.Getenv(alone) == "" { // what other tests leave would be counted
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
	startServer(t, &echo{}).served(t) // what is made once per process
	servers := make([]*testServer, n)
	before, goroutines, kernel := heap(), runtime.NumGoroutine(), socketMemory(t)
	for i := range servers {
		servers[i] = startServer(t, &echo{})
	}
	idle := (heap() - before) / n
	t.Logf("idle: %d KiB of heap and stacks, %d goroutines, %d bytes of socket buffers each",
		idle/1024, (runtime.NumGoroutine()-goroutines)/n, (socketMemory(t)-kernel)/n)
	if idle > 64<<10 {
		t.Errorf("an idle server costs %d bytes", idle)
	}
	for _, s := range servers {
		s.served(t)
		s.served2(t)
	}
	eventually(t, "the clients are gone", func() bool {
		open := 0
		for _, s := range servers {
			stats := s.Stats()
			open += stats.Connections + stats.QUICConnections
		}
		return open == 0
	})
	used := (heap() - before) / n
	t.Logf("after requests of each kind: %d KiB", used/1024)
	// quic-go makes queues of 1 024 packets at the first one.
	if used > 256<<10 {
		t.Errorf("a server that has answered and is idle again costs %d bytes", used)
	}
	runtime.KeepAlive(servers)
}
