package crash

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// vmPoints are the fail points of machines that `make test` visits; `make test-all` visits all fail points of machines.
var vmPoints = []string{
	"vm.create-sandbox.wired", "vm.create-container.defined", "vm.start-container.intent", "vm.start-container.booted",
	"vm.stop-container.pressed", "vm.remove-container.undefined", "vm.stop-sandbox.unwired",
	"network.tap.wire.moved", "network.tap.unwire.parted",
}

// vmVictim returns the machine with which the script makes its calls.
func vmVictim(t *testing.T) (*runtimeapi.PodSandboxConfig, *runtimeapi.ContainerConfig) {
	return harness.PodConfig(t, "victim"), harness.ContainerConfig("c", harness.TinyGuest)
}

// TestN1VMKilledAtEveryFailPoint is TestN1KilledAtEveryFailPoint for machines: a crash interrupts the handling of
// users, taps, leases, disks, definitions and QEMU. Another machine writes ticks, and none may be missing in its log.
func TestN1VMKilledAtEveryFailPoint(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t), harness.Set("vm.default_memory", 32<<20))
	bystander := d.RunVM(t, &harness.PodSpec{Name: "bystander", Image: harness.TinyGuest})
	bystander.WaitConsole("tick 00001")
	began := bystander.Status().StartedAt
	pod, container := vmVictim(t)
	if err := script(d, "vm", pod, container); err != nil {
		t.Fatalf("the script without a crash: %v", err)
	}
	before := resources(d)
	names := without(without(points(t, "vm.", tapPoints), noBootPoints), diskPoints)
	for _, name := range vmPoints {
		if !slices.Contains(names, name) {
			t.Errorf("%s is not a fail point", name)
		}
	}
	if os.Getenv("TRIPOD_TEST_FULL") == "" {
		names = vmPoints
	} else if len(names) < 25 {
		t.Errorf("fail points found: got %d, want at least 25", len(names))
	}
	for _, point := range names {
		t.Run(point, func(t *testing.T) {
			pod, container := vmVictim(t)
			c := crash{d: d, handler: "vm", pod: pod, container: container, bystander: bystander.Pod.ID, before: before}
			c.at(t, point, func() error {
				if s := bystander.Status(); s.State != runtimeapi.ContainerState_CONTAINER_RUNNING || s.StartedAt != began {
					t.Errorf("status of the bystander: got %v, want running since %d", s, began)
				}
				return errors.Join(machinesAreTrue(d), machineTicks(bystander))
			})
		})
	}
}

// machineTicks waits for a new line of a tiny guest and checks that no line before it is missing.
func machineTicks(c *harness.Container) error {
	ticks := func() (n int, err error) {
		for _, line := range c.Logs() {
			_, number, ok := strings.Cut(strings.TrimSpace(line.Text), "tick ")
			if !ok {
				continue // from the firmware
			}
			if n++; number != fmt.Sprintf("%05d", n) {
				return n, fmt.Errorf("line %d of the bystander's log: got %q, want tick %05d", n, line.Text, n)
			}
		}
		return n, nil
	}
	n, err := ticks()
	if err != nil {
		return err
	}
	c.WaitConsole(fmt.Sprintf("tick %05d", n+2))
	_, err = ticks()
	return err
}

// machinesAreTrue compares the state that the daemon reports for each machine with its process.
func machinesAreTrue(d *harness.Daemon) error {
	ctx := context.Background()
	list, err := d.CRI().ListContainers(ctx, &runtimeapi.ListContainersRequest{})
	if err != nil {
		return err
	}
	var errs []error
	for _, c := range list.Containers {
		resp, err := d.CRI().ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: c.Id, Verbose: true})
		if err != nil {
			errs = append(errs, err)
			continue
		}
		var info struct{ Pid int }
		if err := json.Unmarshal([]byte(resp.Info["info"]), &info); err != nil {
			errs = append(errs, err)
		}
		cmdline, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", info.Pid))
		runs := info.Pid != 0 && strings.Contains(string(cmdline), "qemu")
		if says := resp.Status.State == runtimeapi.ContainerState_CONTAINER_RUNNING; says != runs {
			errs = append(errs, fmt.Errorf("container %s is reported as %s, but its process %d runs %q", c.Metadata.Name, resp.Status.State,
				info.Pid, cmdline))
		}
		if s := resp.Status; s.State == runtimeapi.ContainerState_CONTAINER_EXITED && (s.FinishedAt == 0 || s.Reason == "") {
			errs = append(errs, fmt.Errorf("status of container %s: got %v, want a time and a reason of its end", c.Metadata.Name, s))
		}
	}
	return errors.Join(errs...)
}

// TestN4VMNetworkPluginMisbehaves: a machine's pod whose ADD fails leaves nothing. A pod whose plugins create no link
// runs without a network card, and is released once its DEL works, without another order.
func TestN4VMNetworkPluginMisbehaves(t *testing.T) {
	dir := filepath.Join(harness.Dir(), "faulty-vm")
	t.Cleanup(func() { os.RemoveAll(dir) })
	plugin(t, dir, `[ $CNI_COMMAND = ADD ] && { echo '{"code":11,"msg":"no address left"}'; exit 1; }; exit 0`)
	d := harness.StartDaemon(t, harness.VM(t), harness.Set("vm.default_memory", 32<<20),
		harness.Set("network.conf_dir", filepath.Join(dir, "net.d")),
		harness.Set("network.bin_dirs", []string{filepath.Join(dir, "bin")}), harness.Set("network.plugin_timeout", "2s"))
	before := resources(d)
	_, err := d.CRI().RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: harness.PodConfig(t, "p"), RuntimeHandler: "vm"})
	if err == nil || !strings.Contains(err.Error(), "no address left") {
		t.Errorf("RunPodSandbox without an address: got error %v, want the plugin's message", err)
	}
	if err := before.Leaks(resources(d)); err != nil {
		t.Errorf("the failed pod left resources: %v", err)
	}
	ill := filepath.Join(dir, "ill")
	if err := os.WriteFile(ill, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	plugin(t, dir, `case $CNI_COMMAND in ADD) `+result+`;; DEL) [ ! -e `+ill+` ];; esac`)
	pod := d.RunPodWith(t, harness.PodConfig(t, "p"), "vm")
	c := pod.Run(harness.ContainerConfig("c", harness.TinyGuest))
	c.WaitConsole("tick 00001")
	if _, err := d.CRI().StopPodSandbox(t.Context(), &runtimeapi.StopPodSandboxRequest{PodSandboxId: pod.ID}); err == nil {
		t.Error("StopPodSandbox with a failing DEL succeeded, want an error")
	}
	c.WaitExit(137)
	if err := os.Remove(ill); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, 30*time.Second, func() error { return noNetns(d) })
	pod.Remove()
}
