package e2e

import (
	"context"
	"os/exec"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// TestN12PanicEndsItsRequest: a pull, a start of each kind and a stop panic in the same daemon. Each returns Internal, the daemon
// keeps running, and a second try succeeds. The metrics, `tripod check` and `tripod diag` report the panics.
func TestN12PanicEndsItsRequest(t *testing.T) {
	address := harness.FreeAddress(t)
	d := harness.StartDaemon(t, harness.Wasm(t, "node"), harness.VM(t), harness.Set("metrics.address", address), harness.Env(
		"TRIPOD_FAILPOINTS=image.pull.record=1*panic,linux.start-container.conmon=1*panic,wasm.start-container.intent=1*panic,"+
			"vm.start-container.booted=1*panic,node.stop-sandbox.intent=1*panic"))
	pid := d.Pid()
	ctx := context.Background()
	internal := func(what string, err error) {
		t.Helper()
		if status.Code(err) != codes.Internal || strings.Contains(status.Convert(err).Message(), "\n") {
			t.Errorf("%s: got error %v, want Internal in one line", what, err)
		}
	}
	_, err := d.ImageCRI().PullImage(ctx, &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: harness.Busybox}})
	internal("the pull", err)
	d.Pull(t, harness.Busybox)

	var p *harness.Pod
	for handler, config := range map[string]*runtimeapi.ContainerConfig{
		"linux": harness.ContainerConfig("c", harness.Busybox, harness.Sleep()),
		"wasm":  harness.ContainerConfig("c", harness.FaultsC),
		"vm":    harness.ContainerConfig("c", harness.Guest),
	} {
		d.Pull(t, config.Image.Image)
		pod := d.RunPodWith(t, harness.PodConfig(t, handler), handler)
		if t.Cleanup(pod.Remove); handler == "linux" {
			p = pod
		}
		c := pod.Create(config)
		_, err = d.CRI().StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: c.ID})
		internal("the start of a container of handler "+handler, err)
		c.Remove()
		pod.Run(config)
	}

	_, err = d.CRI().StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: p.ID})
	internal("the stop", err)
	p.Remove()

	if text := get(t, "http://"+address+"/metrics"); !strings.Contains(text, "tripod_recovered_panics_total 5") {
		t.Error("metrics: want tripod_recovered_panics_total 5")
	}
	tripod, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"check", "diag"} {
		out, _ := exec.Command(tripod, command, "--config", d.ConfigPath()).CombinedOutput() // fails if the test machine has other problems
		if !strings.Contains(string(out), "has recovered panics: StartContainer (3), StopPodSandbox (1), image pull (1)") {
			t.Errorf("tripod %s: want the five panics in\n%s", command, out)
		}
	}
	if !strings.Contains(d.DaemonLog(), "recovered a panic") || d.Pid() != pid {
		t.Errorf("got daemon process %d, want still %d and the recovered panics in its log", d.Pid(), pid)
	}
}
