package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/test/harness"
)

// TestReleaseHasNoTestMachinery: the program that users get names no fail point and refuses the fake backend.
func TestReleaseHasNoTestMachinery(t *testing.T) {
	tripod, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(tripod)
	if err != nil {
		t.Fatal(err)
	}
	points := harness.FailPoints(t)
	if len(points) < 100 {
		t.Errorf("the build for tests has %d fail points, want 100 or more", len(points))
	}
	for _, name := range points {
		if bytes.Contains(program, []byte(name)) {
			t.Errorf("the release contains the name of the fail point %s", name)
		}
	}
	d := harness.NewDaemon(t, harness.Set("backends.fake", true))
	out, err := exec.Command(tripod, "daemon", "--config", d.ConfigPath()).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "backends.fake:") {
		t.Errorf("a release with backends.fake ended with %v, want an error that names the key:\n%s", err, out)
	}
}
