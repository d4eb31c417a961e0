package kubelet

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

// TestDocuments applies the objects in the other guides unchanged. It only pushes the images that a reader would push.
func TestDocuments(t *testing.T) {
	c := kube.Shared(t)
	t.Parallel()
	t.Run("wasm.md", func(t *testing.T) {
		t.Parallel()
		push(t, "calc:1", "examples/wasm/greeter-c/greeter-c.wasm", "--proto", harness.Root()+"/examples/wasm/greeter/greeter.proto")
		n := c.Namespace(t)
		applyDocument(t, n, "wasm.md")
		n.WaitPods("app=calc", 3, kube.Timeout)
	})
	t.Run("kubernetes.md", func(t *testing.T) {
		t.Parallel()
		var node corev1.Node
		if err := c.Get("/api/v1/nodes/"+kube.NodeName, &node); err != nil {
			t.Fatal(err)
		}
		handlers := map[string]bool{}
		for _, h := range node.Status.RuntimeHandlers {
			handlers[h.Name] = true
		}
		for _, name := range []string{"", "linux", "wasm", "vm"} { // the cluster applied the RuntimeClasses when it started
			if !handlers[name] {
				t.Errorf("handlers of the node: got %v, want %q among them", node.Status.RuntimeHandlers, name)
			}
		}
	})
}

// TestDocumentOfMachines applies the objects in vm.md unchanged. Its machine requests two CPUs, which are all of the node's,
// so it does not run in parallel.
func TestDocumentOfMachines(t *testing.T) {
	c := kube.Shared(t)
	push(t, "debian:12", "build/images/vm/disk.qcow2")
	n := c.Namespace(t)
	applyDocument(t, n, "vm.md")
	pod := n.WaitReady("debian", harness.GuestTimeout)
	if pod.Spec.Overhead.Memory().IsZero() {
		t.Errorf("overhead of the pod: got %v, want memory", pod.Spec.Overhead)
	}
	n.WaitLog("seed=nocloud", kube.Timeout, "debian")
}

// applyDocument applies the manifests in a document.
func applyDocument(t *testing.T, n *kube.Namespace, document string) {
	t.Helper()
	manifests, err := harness.Manifests(document)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range manifests {
		n.Apply(m)
	}
}

// push pushes a file to the tests' registry, which serves the images of every registry name.
func push(t *testing.T, name, file string, args ...string) {
	t.Helper()
	tripod, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	args = append([]string{"push", "--plain-http", filepath.Join(harness.Root(), file), harness.Registry(t).Addr + "/" + name}, args...)
	if out, err := exec.CommandContext(t.Context(), tripod, args...).CombinedOutput(); err != nil {
		t.Fatalf("tripod %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}
