package e2e

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// TestHandlerAliases: RuntimeClasses of another runtime keep working, over restarts and crashes of the daemon as well.
func TestHandlerAliases(t *testing.T) {
	d := harness.StartDaemon(t)
	k := newKubelet(t, d)
	p := k.newPod("alias", &kubeContainer{name: "c", image: harness.Busybox, command: sleeps("")})
	p.handler = "runc"
	before := k.states(p, "c running")
	if h := before.sandbox().RuntimeHandler; h != "runc" {
		t.Errorf("the sandbox tells the handler %q", h)
	}
	d.Kill()
	d.Start()
	k.runtime, k.images = d.Runtime(), d.Images()
	after := k.states(p, "c running")
	if after.String() != before.String() || after.sandbox().RuntimeHandler != "runc" {
		t.Errorf("before %v\nafter %v", before, after)
	}
	if out, _, err := k.runtime.ExecSync(t.Context(), after.of(p.containers[0]).Id, shell("echo yes"), 0); string(out) != "yes\n" {
		t.Errorf("exec: %q, %v", out, err)
	}
	k.remove(p)
}

// TestHandlerAliasesConfigured: a table of the operator's replaces the default one, and is refused when it is wrong.
func TestHandlerAliasesConfigured(t *testing.T) {
	d := harness.StartDaemon(t, harness.Set("node.handler_aliases", map[string]string{"kata": "linux"}))
	d.RunPodWith(t, harness.PodConfig(t, "p"), "kata").Remove()
	_, err := d.CRI().RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: harness.PodConfig(t, "q"), RuntimeHandler: "runc"})
	wantCode(t, err, codes.InvalidArgument)
	if !strings.Contains(err.Error(), "node.handler_aliases") {
		t.Errorf("got %v, want an error that names node.handler_aliases", err)
	}
	wrong := harness.NewDaemon(t, harness.Set("node.handler_aliases", map[string]string{"kata": "firecracker"}))
	if err := wrong.TryStart(); err == nil || !strings.Contains(wrong.DaemonLog(), "node.handler_aliases.kata") {
		t.Errorf("started with an alias of nothing: %v\n%s", err, wrong.DaemonLog())
	}
}
