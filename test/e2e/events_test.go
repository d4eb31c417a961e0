package e2e

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/test/harness"
)

// TestEventsAndProgress: a pull on a terminal ends with a full bar. The node remembers a container's events, and a client that
// watches continues with new ones after a crash of the daemon.
func TestEventsAndProgress(t *testing.T) {
	d := harness.StartDaemon(t)
	command, _, screen := onTerminal(t, tripod(t, d, "pull", harness.Nginx))
	waitSuccess(t, command, screen)
	if out := screen.String(); !strings.Contains(out, "pulling "+harness.Nginx+" [====") || !strings.Contains(out, "MB of ") ||
		!strings.Contains(out, "sha256:") {
		t.Errorf("pull on a terminal: got %q, want a bar with bytes, and the image's ID", out)
	}

	c := d.RunPod(t, harness.PodConfig(t, "first")).Run(harness.ContainerConfig("exits", harness.Busybox, harness.Shell("exit 4")))
	c.WaitExit(4)
	c.Remove()
	out, err := tripod(t, d, "events").CombinedOutput()
	if err != nil {
		t.Fatalf("events: %v\n%s", err, out)
	}
	var got []string
	for _, line := range strings.Split(string(out), "\n") {
		if cells := strings.Fields(line); len(cells) == 4 && cells[3] == "exits" {
			got = append(got, cells[1])
		}
	}
	if want := "created started stopped deleted"; strings.Join(got, " ") != want {
		t.Errorf("events of the container: got %v, want %s; all:\n%s", got, want, out)
	}

	watch := tripod(t, d, "events", "-w")
	events := &buffer{}
	watch.Stdout, watch.Stderr = events, events
	if err := watch.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = watch.Process.Kill() })
	events.wait(t, "/first")
	d.Kill()
	events.wait(t, "events may be missing")
	d.Start()
	d.RunPod(t, harness.PodConfig(t, "second"))
	events.wait(t, "/second")
	if err := watch.Process.Signal(unix.SIGINT); err != nil {
		t.Fatal(err)
	}
	if err := watch.Wait(); err != nil {
		t.Errorf("events -w after SIGINT: got error %v, want exit code 0", err)
	}
}
