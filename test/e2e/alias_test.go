package e2e

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// TestHandlerAliases: the handler names of another runtime work, even after restarts and crashes of the daemon.
func TestHandlerAliases(t *testing.T) {
	d := harness.StartDaemon(t)
	k := newKubelet(t, d)
	p := k.newPod("alias", &kubeContainer{name: "c", image: harness.Busybox, command: sleeps("")})
	p.handler = "runc"
	before := k.states(p, "c running")
	if h := before.sandbox().RuntimeHandler; h != "runc" {
		t.Errorf("handler in the sandbox status: got %q, want runc", h)
	}
	d.Kill()
	d.Start()
	k.runtime, k.images = d.Runtime(), d.Images()
	after := k.states(p, "c running")
	if after.String() != before.String() || after.sandbox().RuntimeHandler != "runc" {
		t.Errorf("status after the crash: got %v, want %v", after, before)
	}
	if out, _, err := k.runtime.ExecSync(t.Context(), after.of(p.containers[0]).Id, shell("echo yes"), 0); string(out) != "yes\n" {
		t.Errorf("exec: got output %q, error %v; want yes", out, err)
	}
	k.remove(p)
}

// TestHandlerAliasesConfigured: a configured table replaces the default table. The daemon refuses an invalid one.
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
		t.Errorf("start with an alias of an unknown handler: got error %v, want a refusal that names the key:\n%s", err, wrong.DaemonLog())
	}
}
