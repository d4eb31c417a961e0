package crash

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/until"
)

// TestN1VMTemplates kills the daemon while a disk machine continues from a template. A machine that runs afterwards is the pod's
// own instance, and one that does not can be started: it continues with disks to which nobody has written.
func TestN1VMTemplates(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	d.Pull(t, harness.DiskGuest)
	pod := harness.PodConfig(t, "victim")
	pod.Hostname, pod.Annotations = "victim", map[string]string{"tripod.dev/vm.template": "cloud-init"}
	container := harness.ContainerConfig("c", harness.DiskGuest)
	if err := script(d, "vm", pod, container); err != nil {
		t.Fatalf("the script without a crash: %v", err)
	}
	until.Within(t, harness.GuestTimeout, "a template is made", func() bool { return strings.Contains(d.DaemonLog(), "made a template") })
	d.AwaitRemovals()
	before := resources(d)
	for _, point := range []string{templatePoints + "copied", "qemu.start.continued", "vm.start-container.booted",
		templatePoints + "renewed"} {
		t.Run(point, func(t *testing.T) {
			d.Restart(failpoint.Variable + "=" + point + "=kill")
			err := script(d, "vm", pod, container)
			awaitKill(t, d)
			if err == nil {
				t.Error("the script succeeded, although the daemon was killed")
			}
			d.Start()
			if err := errors.Join(recordIsTrue(d), isOwnInstance(t, d)); err != nil {
				t.Error(err)
			}
			if err := d.RemoveAllPods(); err != nil {
				t.Fatal(err)
			}
			harness.Eventually(t, 10*time.Second, func() error { return before.Leaks(resources(d)) })
			if err := script(d, "vm", pod, container); err != nil {
				t.Errorf("the same calls after the crash: %v", err)
			}
			if log := d.DaemonLog(); strings.Contains(log, "boots instead") {
				t.Error("the machine did not continue from the template after the crash")
			}
		})
	}
}

// isOwnInstance starts the container of the only pod, unless it runs, and waits until its guest has the pod's name.
func isOwnInstance(t *testing.T, d *harness.Daemon) error {
	t.Helper()
	list, err := d.CRI().ListContainers(t.Context(), &runtimeapi.ListContainersRequest{})
	if err != nil || len(list.Containers) != 1 {
		return fmt.Errorf("containers after the crash: got %v, error %w, want one", list.GetContainers(), err)
	}
	c := list.Containers[0]
	if c.State == runtimeapi.ContainerState_CONTAINER_CREATED {
		if _, err := d.CRI().StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: c.Id}); err != nil {
			return err
		}
	}
	harness.Eventually(t, harness.GuestTimeout, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		out, err := d.CRI().ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: c.Id, Cmd: []string{"hostname"}, Timeout: 10})
		if err == nil && string(out.Stdout) != "victim\n" {
			err = fmt.Errorf("the guest's name is %q", out.Stdout)
		}
		return err
	})
	return nil
}
