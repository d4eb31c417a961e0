package e2e

import (
	"bytes"
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	nodev1 "k8s.io/api/node/v1"
	"sigs.k8s.io/yaml"

	"github.com/tripod-run/tripod/test/harness"
)

// runtimeClasses returns the RuntimeClasses in contrib by their handlers. Documents and examples must have no others.
func runtimeClasses(t *testing.T) map[string]*nodev1.RuntimeClass {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(harness.Root(), "contrib/kubernetes/runtimeclasses.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"docs", "examples", "contrib"} { // another copy would be applied over these, or be deleted with a pod
		_ = filepath.WalkDir(filepath.Join(harness.Root(), dir), func(path string, _ fs.DirEntry, err error) error {
			other, readErr := os.ReadFile(path)
			if err == nil && readErr == nil && strings.Contains(string(other), "kind: RuntimeClass\n") && !bytes.Equal(other, text) {
				t.Errorf("%s has a RuntimeClass: the place for them is contrib/kubernetes/runtimeclasses.yaml", path)
			}
			return err
		})
	}
	classes := map[string]*nodev1.RuntimeClass{}
	for _, document := range strings.Split(string(text), "\n---\n") {
		class := &nodev1.RuntimeClass{}
		if err := yaml.UnmarshalStrict([]byte(document), class); err != nil {
			t.Fatal(err)
		}
		classes[class.Handler] = class
	}
	return classes
}

// TestRuntimeClasses: the overhead in the RuntimeClasses covers what a pod of each kind was measured to need besides its
// containers, and not many times as much. That of machines is the node's vm.memory_overhead, which limits QEMU.
func TestRuntimeClasses(t *testing.T) {
	classes := runtimeClasses(t)
	d := harness.StartDaemon(t, harness.Wasm(t, "node"), harness.VMOCI(t))
	for _, c := range []struct {
		handler, image, pods, memory string
		helper                       string // one for each pod; empty: none
		most                         int64  // times the measured value; 0: any, because the daemons' heaps can shrink meanwhile
	}{
		// Many, because a heap of the daemons can grow by 16 MiB meanwhile.
		{"linux", harness.Busybox, "60", "0", "conmon", 8},
		{"wasm", harness.GreeterC, "60", "0", "", 0},
		{"vm", harness.TinyGuest, "1", "67108864", "qemu-system-x86", 16},
		{"vm-oci", harness.Busybox, "1", "67108864", "qemu-system-x86", 16},
	} {
		out := filepath.Join(t.TempDir(), "report.json")
		args := []string{"bench", "overhead", "--socket", "unix://" + d.Socket, "--handler", c.handler, "--image", c.image, "--pods", c.pods,
			"--memory", c.memory, "--idle", "1s", "--log-dir", t.TempDir(), "--json", out}
		if c.image != harness.Busybox {
			args = append(args, "--command", "")
		}
		bin, err := harness.Binary()
		if err != nil {
			t.Fatal(err)
		}
		text, err := exec.Command(bin, args...).CombinedOutput()
		if err != nil {
			t.Fatalf("bench overhead of %s: %v\n%s", c.handler, err, text)
		}
		t.Logf("%s", text)
		var measured struct {
			Memory  int64 `json:"memory_bytes_per_pod"`
			Helpers map[string]int
		}
		raw, err := os.ReadFile(out)
		if err == nil {
			err = json.Unmarshal(raw, &measured)
		}
		if err != nil {
			t.Fatal(err)
		}
		class := classes[c.handler]
		if class == nil || class.Overhead == nil {
			t.Fatalf("contrib has no RuntimeClass with an overhead for %s", c.handler)
		}
		declared := class.Overhead.PodFixed.Memory().Value()
		if measured.Memory > declared || c.most > 0 && measured.Memory*c.most < declared {
			t.Errorf("overhead of %s: measured %d bytes, the RuntimeClass has %d; want between 1 and %d times the measured", c.handler,
				measured.Memory, declared, c.most)
		}
		if c.helper != "" && measured.Helpers[c.helper] == 0 {
			t.Errorf("helpers of %s: got %v, want %s", c.handler, measured.Helpers, c.helper)
		}
	}
}
