package crash

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/until"
)

// templatePoints begins the names of the fail points of a template's making.
const templatePoints = "vm-template."

// TestN1VMOCITemplates kills the daemon while it makes a template, and while a machine continues from one. The machine that
// asked for the template is not affected, nothing of the template's machine is left, and the next daemon makes the template
// and uses it.
func TestN1VMOCITemplates(t *testing.T) {
	d := harness.StartDaemon(t, harness.VMOCITemplates(t))
	before := resources(d)
	names := []string{templatePoints + "booted", templatePoints + "saved", templatePoints + "made", "qemu.save.saved"}
	if os.Getenv("TRIPOD_TEST_FULL") == "" {
		names = []string{templatePoints + "saved"}
	}
	for _, point := range names {
		t.Run(point, func(t *testing.T) {
			d.Restart(failpoint.Variable + "=" + point + "=kill")
			bystander := ticking(t, d)
			awaitKill(t, d)
			d.Start()
			if err := errors.Join(recordIsTrue(d), stillTicking(bystander)); err != nil {
				t.Error(err)
			}
			if left := templateDirs(t, d); len(left) > 1 ||
				slices.ContainsFunc(left, func(name string) bool { return strings.HasPrefix(name, "new-") }) {
				t.Errorf("directories of templates: got %v, want that the incomplete one is removed", left)
			}
			if err := d.RemoveAllPods(); err != nil {
				t.Fatal(err)
			}
			harness.Eventually(t, 10*time.Second, func() error { return before.Leaks(resources(d)) })
			continues(t, d)
			d.Stop() // nothing uses the templates
			if err := os.RemoveAll(filepath.Join(d.Root, "vm-oci", "templates")); err != nil {
				t.Fatal(err)
			}
			d.Start()
		})
	}
	continues(t, d)
	before = resources(d)
	for _, point := range []string{"qemu.start.filled", "qemu.start.continued"} {
		t.Run(point, func(t *testing.T) {
			d.Restart(failpoint.Variable + "=" + point + "=kill")
			pod, container := harness.PodConfig(t, "victim"), harness.ContainerConfig("c", harness.Busybox, harness.Sleep())
			err := script(d, harness.OCIHandler, pod, container)
			awaitKill(t, d)
			if err == nil {
				t.Error("the script succeeded, although the daemon was killed")
			}
			d.Start()
			if err := d.RemoveAllPods(); err != nil {
				t.Fatal(err)
			}
			harness.Eventually(t, 10*time.Second, func() error { return before.Leaks(resources(d)) })
			if err := script(d, harness.OCIHandler, pod, container); err != nil {
				t.Errorf("the same calls after the crash: %v", err)
			}
			if log := d.DaemonLog(); strings.Contains(log, "boots instead") {
				t.Error("the machine did not continue from the template after the crash")
			}
		})
	}
}

// ticking runs a pod whose container ticks.
func ticking(t *testing.T, d *harness.Daemon) *harness.Container {
	t.Helper()
	pod := d.RunPodWith(t, harness.PodConfig(t, "bystander"), harness.OCIHandler)
	c := pod.Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell("i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.1; done")))
	c.WaitLog("tick 1")
	return c
}

// awaitKill waits until a fail point has killed the daemon.
func awaitKill(t *testing.T, d *harness.Daemon) {
	t.Helper()
	if state := d.WaitExit(harness.GuestTimeout); state.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("the daemon ended with %v, want SIGKILL at the fail point", state)
	}
}

// templateDirs returns the names of the directories of templates, complete or not.
func templateDirs(t *testing.T, d *harness.Daemon) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(d.Root, "vm-oci", "templates"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// continues runs pods until one has continued from a template, and removes them. The node uses a template a moment after its
// directory is complete.
func continues(t *testing.T, d *harness.Daemon) {
	t.Helper()
	before := len(d.DaemonLog())
	for i := range 4 {
		d.RunPodWith(t, harness.PodConfig(t, fmt.Sprint("pod", i)), harness.OCIHandler)
		until.Within(t, harness.GuestTimeout, "a template is made", func() bool {
			dirs := templateDirs(t, d)
			return len(dirs) == 1 && !strings.HasPrefix(dirs[0], "new-")
		})
		if strings.Contains(d.DaemonLog()[before:], "template="+templateDirs(t, d)[0]+" network=") {
			if err := d.RemoveAllPods(); err != nil {
				t.Fatal(err)
			}
			return
		}
	}
	t.Errorf("no machine has continued from a template")
}
