package e2e

import (
	"os/exec"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// TestEdgeBesideKubelet: one node serves a kubelet and runs modules. The kubelet ends pods that it does not know
// (HandlePodCleanups) and removes their containers, so the CRI does not list modules to it, and cannot create them.
func TestEdgeBesideKubelet(t *testing.T) {
	n := startEdge(t, false)
	module := n.relay("module", "app/a", "app/b")
	n.relays("app/a", "app/b", "before")
	k := newKubelet(t, n.d)
	p := k.newPod("pod", &kubeContainer{name: "c", image: harness.Busybox, command: sleeps("")})
	p.handler = "linux"
	k.states(p, "c running")
	mine := k.status(p).sandbox().Id
	sandboxes, err := k.runtime.ListPodSandbox(t.Context(), nil)
	k.must(err)
	for _, s := range sandboxes {
		if s.Id != mine {
			k.removeSandbox(s.Id)
		}
	}
	containers, err := k.runtime.ListContainers(t.Context(), nil)
	k.must(err)
	if len(sandboxes) != 1 || len(containers) != 1 {
		t.Errorf("listed to the kubelet: got %d pods and %d containers, want one of each", len(sandboxes), len(containers))
	}
	k.relist()
	n.relays("app/a", "app/b", "after")

	pods := n.pods()
	if len(pods) != 1 {
		t.Fatalf("pods of modules: got %q, want one", pods)
	}
	tripod, err := harness.Binary()
	k.must(err)
	out, err := exec.Command(tripod, "pods", "-q", "--endpoint", n.d.Socket).CombinedOutput()
	if err != nil || !strings.Contains(string(out), pods[0][:12]) || !strings.Contains(string(out), mine[:12]) {
		t.Errorf("tripod pods: got error %v, want both pods in\n%s", err, out)
	}
	config := k.sandboxConfig(p, 1)
	config.Annotations = map[string]string{"tripod.dev/edge.runtime": "mine"}
	if _, err := n.d.CRI().RunPodSandbox(t.Context(),
		&runtimeapi.RunPodSandboxRequest{Config: config}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("RunPodSandbox of a module: got error %v, want InvalidArgument", err)
	}
	n.o.MustEdge("stop", module)
	n.exitStatus(module)
}
