package kubelet

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

// TestInstalled is for a host with Tripod's package and systemd, on which test/host runs it: pods of all kinds work there,
// their containers are units in the slice of the pod, and nothing that is ours is logged.
func TestInstalled(t *testing.T) {
	if !harness.Installed() {
		t.Skip("the tests of test/host run it on a host with Tripod's package")
	}
	c := kube.Shared(t)
	kubelet, daemon := from(t, c.Kubelet), from(t, c.Daemon)
	t.Run("pods", func(t *testing.T) { // returns when the parallel tests have ended
		t.Run("smoke", TestSmoke)
		t.Run("resize", TestResize)
	})
	checkQuiet(t, kubelet, daemon, nil)
}

// inPod matches the path of a unit in the slice that a kubelet makes for a pod.
var inPod = regexp.MustCompile(`^/kubepods\.slice/(?:kubepods-\w+\.slice/)?kubepods-(?:\w+-)?pod(\w+)\.slice/tripod-[\w-]+\.(?:scope|service)$`)

// checkUnit checks, on a host with systemd, that the cgroup that Tripod reports for the pod "sized" is a scope in the pod's
// slice and has the container's limits.
func checkUnit(t *testing.T, k kind, n *kube.Namespace, want size) {
	t.Helper()
	if !harness.Installed() || k.name == "wasm" { // a component that shares a worker has no cgroup
		return
	}
	pod := n.Pod("sized")
	path, err := n.CgroupOf(pod)
	if err != nil {
		t.Fatal(err)
	}
	if m := inPod.FindStringSubmatch(path); m == nil || m[1] != strings.ReplaceAll(string(pod.UID), "-", "_") {
		t.Fatalf("cgroup of the pod %s: got %s, want a unit in its slice", pod.UID, path)
	}
	memory, cpu := quantity(want.memory), 0
	if k.name == "vm" {
		memory += pod.Spec.Overhead.Memory().Value() // QEMU's own
	}
	if _, err := fmt.Sscanf(want.cpu, "%dm", &cpu); err != nil {
		t.Fatal(err)
	}
	for file, limit := range map[string]string{"memory.max": fmt.Sprint(memory), "cpu.max": fmt.Sprint(cpu*100, " ", 100_000)} {
		got, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", path, file))
		if err != nil || strings.TrimSpace(string(got)) != limit {
			t.Errorf("%s of %s: got %q, %v; want %q", file, path, got, err, limit)
		}
	}
}
