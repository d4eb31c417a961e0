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
// (HandlePodCleanups) and collects their containers; modules are not among what it is listed, and cannot be made over the CRI.
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
		t.Errorf("the kubelet is listed %d pods and %d containers", len(sandboxes), len(containers))
	}
	k.relist()
	n.relays("app/a", "app/b", "after")

	pods := n.pods()
	if len(pods) != 1 {
		t.Fatalf("the node's modules are %q", pods)
	}
	tripod, err := harness.Binary()
	k.must(err)
	out, err := exec.Command(tripod, "pods", "-q", "--endpoint", n.d.Socket).CombinedOutput()
	if err != nil || !strings.Contains(string(out), pods[0][:12]) || !strings.Contains(string(out), mine[:12]) {
		t.Errorf("tripod pods: %v\n%s", err, out)
	}
	config := k.sandboxConfig(p, 1)
	config.Annotations = map[string]string{"tripod.dev/edge.runtime": "mine"}
	if _, err := n.d.CRI().RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: config}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a module over the CRI: %v", err)
	}
	n.o.MustEdge("stop", module)
	n.exitStatus(module)
}
