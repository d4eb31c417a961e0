package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/test/harness"
)

// TestReleaseHasNoTestMachinery: the released programs contain no fail point, and the daemon refuses the fake backend.
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
		t.Errorf("fail points in the build for tests: got %d, want at least 100", len(points))
	}
	for _, name := range points {
		if bytes.Contains(program, []byte(name)) {
			t.Errorf("the release contains the name of the fail point %s", name)
		}
	}
	guest, err := os.ReadFile(filepath.Join(harness.Root(), "build", "bin", "tripod-guest"))
	if err != nil {
		t.Fatalf("the program in the guest of OCI pods is missing (make build): %v", err)
	}
	for _, name := range append(points, "vm-guest.", "tripod-failpoint") {
		if bytes.Contains(guest, []byte(name)) {
			t.Errorf("the released tripod-guest contains %s", name)
		}
	}
	d := harness.NewDaemon(t, harness.Set("backends.fake", true))
	out, err := exec.Command(tripod, "daemon", "--config", d.ConfigPath()).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "backends.fake:") {
		t.Errorf("start of a release with backends.fake: got error %v, want one that names the key:\n%s", err, out)
	}
}
