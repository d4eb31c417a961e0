package e2e

import (
	"io"
	"strconv"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/test/harness"
)

// TestTop: one table has pods of two kinds and what they use. On a terminal the view follows the node, also over a
// restart of the daemon, sorts by key, and ends with q.
func TestTop(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	busy := d.RunPod(t, harness.PodConfig(t, "busy"))
	busy.Run(harness.ContainerConfig("busy", harness.Busybox, harness.Shell("while :; do :; done")))
	d.RunWasm(t, &harness.PodSpec{Name: "greeter", Image: harness.GreeterC})

	out, err := tripod(t, d, "top", "--once", "--interval", "1s").CombinedOutput()
	if err != nil {
		t.Fatalf("top --once: %v\n%s", err, out)
	}
	rows := map[string][]string{}
	for _, line := range strings.Split(string(out), "\n") {
		if cells := strings.Fields(line); len(cells) == 9 {
			rows[cells[1]] = cells
		}
	}
	if len(rows) != 2 {
		t.Fatalf("top --once: got\n%s\nwant two pods", out)
	}
	b, g := rows["busy"], rows["greeter"]
	if cpu, err := strconv.ParseFloat(b[5], 64); err != nil || cpu < 5 {
		t.Errorf("CPU %% of a busy container: got %s, want at least 5", b[5])
	}
	if b[7] != "-" || g[7] != "0.0" || g[2] != "wasm" || b[3] != "Ready" {
		t.Errorf("rows: got %q and %q, want requests of the component only, and both ready", b, g)
	}

	command, keys, screen := onTerminal(t, tripod(t, d, "top", "--interval", "200ms"))
	screen.wait(t, "2 pods, 2 ready")
	screen.wait(t, "sorted by cpu")
	d.Kill()
	screen.wait(t, "the figures are old")
	d.Start()
	busy.Stop()
	screen.wait(t, "1 ready")
	for key, sorting := range map[string]string{"m": "memory", "a": "age"} {
		if _, err := io.WriteString(keys, key); err != nil {
			t.Fatal(err)
		}
		screen.wait(t, sorting)
	}
	if _, err := io.WriteString(keys, "q"); err != nil {
		t.Fatal(err)
	}
	waitSuccess(t, command, screen)
}
