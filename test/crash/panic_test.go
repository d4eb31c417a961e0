package crash

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/test/harness"
)

// panicked is the beginning of what the fail points panic with.
const panicked = "fail point "

// TestN12PanicAtEveryFailPoint panics once at each fail point in the lives of pods of each kind, all in one daemon. Only
// the call that panics fails; its pod can be removed, and at last the same calls succeed and leave nothing behind.
func TestN12PanicAtEveryFailPoint(t *testing.T) {
	names := points(t, "linux.", "network.", "wasm.", "vm.")
	for _, prefix := range []string{noBootPoints, diskPoints, batchPoint} {
		names = without(names, prefix)
	}
	d := harness.NewDaemon(t, harness.Wasm(t, "namespace"), harness.VM(t), harness.Set("vm.default_memory", 32<<20))
	d.Start(failpoint.Variable + "=" + strings.Join(names, "=1*panic,") + "=1*panic")
	pid := d.Pid()
	for _, image := range []string{harness.Busybox, harness.FetchC, harness.TinyGuest} {
		d.Pull(t, image)
	}
	for _, kind := range []struct {
		handler string
		victim  func(*testing.T) (*runtimeapi.PodSandboxConfig, *runtimeapi.ContainerConfig)
	}{{"linux", victim}, {"wasm", wasmVictim}, {"vm", vmVictim}} {
		handler := kind.handler
		pod, container := kind.victim(t)
		if handler == "linux" {
			pod.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &runtimeapi.UserNamespace{}
		}
		for {
			err := script(d, handler, pod, container)
			if err == nil {
				break
			}
			if !strings.Contains(err.Error(), panicked) {
				t.Fatalf("handler %s: got error %v, want one with a fail point", handler, err)
			}
			removePanicking(t, d)
		}
	}
	harness.Eventually(t, 10*time.Second, func() error {
		log := d.DaemonLog()
		left := slices.DeleteFunc(slices.Clone(names), func(name string) bool {
			return strings.Contains(log, panicked+name)
		})
		if len(left) > 0 {
			return fmt.Errorf("fail points not reached: %q", left)
		}
		return nil
	})
	if d.Pid() != pid {
		t.Errorf("got daemon process %d, want still %d", d.Pid(), pid)
	}
}

// removePanicking removes all pods. It repeats a call that panics.
func removePanicking(t *testing.T, d *harness.Daemon) {
	t.Helper()
	ctx := context.Background()
	list, err := d.CRI().ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range list.Items {
		for {
			_, err := d.CRI().RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: p.Id})
			if err == nil {
				break
			}
			if !strings.Contains(err.Error(), panicked) {
				t.Fatalf("remove %s: got error %v, want one with a fail point", p.Metadata.Name, err)
			}
		}
	}
}
