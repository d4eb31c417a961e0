package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// tinyVM starts a daemon for machines whose guest is only a boot sector.
func tinyVM(t *testing.T, opts ...harness.Option) *harness.Daemon {
	t.Helper()
	return harness.StartDaemon(t, append([]harness.Option{harness.VM(t), harness.Set("vm.default_memory", 32<<20)}, opts...)...)
}

// mainPid returns the PID of a container's first process, machine or worker.
func mainPid(t *testing.T, d *harness.Daemon, c *harness.Container) int {
	t.Helper()
	resp, err := d.CRI().ContainerStatus(t.Context(), &runtimeapi.ContainerStatusRequest{ContainerId: c.ID, Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	var info struct{ Pid int }
	if err := json.Unmarshal([]byte(resp.Info["info"]), &info); err != nil || info.Pid == 0 {
		t.Fatalf("verbose status: got %q, error %v; want a PID", resp.Info["info"], err)
	}
	return info.Pid
}

// wantTicks checks that the log has every tick once and in order, and returns their number.
func wantTicks(t *testing.T, c *harness.Container) int {
	t.Helper()
	n := 0
	for _, line := range c.Logs() {
		_, number, ok := strings.Cut(strings.TrimSpace(line.Text), "tick ")
		if !ok {
			continue // from the firmware
		}
		if n++; number != fmt.Sprintf("%05d", n) {
			t.Fatalf("line %d of the log: got %q, want tick %05d", n, line.Text, n)
		}
	}
	return n
}

// TestN1VMLogsOverKill: a machine's output while the daemon is down is in its log after the restart, once and in order.
// The machine keeps running.
func TestN1VMLogsOverKill(t *testing.T) {
	d := tinyVM(t)
	c := d.RunVM(t, &harness.PodSpec{Image: harness.TinyGuest})
	pid := mainPid(t, d, c)
	for round := range 3 {
		c.WaitConsole(fmt.Sprintf("tick %05d", 4*(round+1)+wantTicks(t, c)))
		d.Kill()
		d.Start()
	}
	c.WaitConsole(fmt.Sprintf("tick %05d", wantTicks(t, c)+4))
	wantTicks(t, c)
	if now := mainPid(t, d, c); now != pid {
		t.Errorf("PID of the machine: got %d, want %d", now, pid)
	}
	c.Stop(30 * time.Second)
	c.WaitExit(0)
	c.Start()
	c.Stop(0)
	c.WaitExit(137)
}

// TestV1Killed: a machine whose process is killed has exited, and can be started again.
func TestV1Killed(t *testing.T) {
	d := tinyVM(t)
	c := d.RunVM(t, &harness.PodSpec{Image: harness.TinyGuest})
	c.WaitConsole("tick 00001")
	if err := syscall.Kill(mainPid(t, d, c), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if s := c.WaitExit(137); s.Reason != "Error" || s.Message == "" {
		t.Errorf("status: got %v, want reason Error and a message", s)
	}
	c.Start()
	c.WaitState(runtimeapi.ContainerState_CONTAINER_RUNNING)
}

// TestV1EndedWhileAway: after a restart, the daemon knows how machines ended while it was down.
func TestV1EndedWhileAway(t *testing.T) {
	d := tinyVM(t)
	off := d.RunVM(t, &harness.PodSpec{Name: "off", Image: harness.TinyEnds})
	off.WaitExit(0)
	killed := d.RunVM(t, &harness.PodSpec{Name: "killed", Image: harness.TinyGuest})
	pid := mainPid(t, d, killed)
	d.Kill()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	d.Start()
	if s := killed.WaitState(runtimeapi.ContainerState_CONTAINER_EXITED); s.ExitCode == 0 || s.Reason == "Completed" {
		t.Errorf("status of the killed machine: got %v, want an exit code other than 0", s)
	}
	if s := off.Status(); s.ExitCode != 0 || s.Reason != "Completed" {
		t.Errorf("status of the machine that turned itself off: got %v, want Completed with code 0", s)
	}
}

// TestV1Hung: a machine whose process hangs does not affect others, and is killed after the grace period.
func TestV1Hung(t *testing.T) {
	d := tinyVM(t)
	healthy := d.RunVM(t, &harness.PodSpec{Name: "healthy", Image: harness.TinyGuest})
	hung := d.RunVM(t, &harness.PodSpec{Name: "hung", Image: harness.TinyGuest})
	if err := syscall.Kill(mainPid(t, d, hung), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	list, err := d.CRI().ListContainerStats(t.Context(), &runtimeapi.ListContainerStatsRequest{})
	if err != nil || time.Since(begin) > 5*time.Second {
		t.Errorf("ListContainerStats: got error %v after %v, want success within 5s", err, time.Since(begin))
	}
	found := false
	for _, s := range list.GetStats() {
		found = found || s.Attributes.Id == healthy.ID && s.Memory.GetUsageBytes().GetValue() > 0
	}
	if !found {
		t.Errorf("stats: got %v, want those of the healthy machine among them", list)
	}
	begin = time.Now()
	hung.Stop(2 * time.Second)
	if took := time.Since(begin); took < 2*time.Second || took > 30*time.Second {
		t.Errorf("stop: took %v, want 2s to 30s", took)
	}
	hung.WaitExit(137)
	healthy.Stop(30 * time.Second)
	healthy.WaitExit(0)
}

// TestV1Guest: a machine keeps running if its guest reboots, and exits with a reason if the guest's kernel panics. A
// guest that ignores its power button is killed after the grace period.
func TestV1Guest(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	c := d.RunVM(t, &harness.PodSpec{Image: harness.Guest})
	c.WaitGuest()
	waitAgent(t, d, c)
	began := c.Status().StartedAt
	_, _ = d.CRI().ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"reboot", "-f"}, Timeout: 5})
	c.WaitGuestBoot(2)
	if s := c.Status(); s.State != runtimeapi.ContainerState_CONTAINER_RUNNING || s.StartedAt != began {
		t.Errorf("status after the reboot: got %v, want the same run", s)
	}
	waitAgent(t, d, c)
	_, _ = d.CRI().ExecSync(t.Context(),
		&runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"sh", "-c", "echo c >/proc/sysrq-trigger"}, Timeout: 5})
	harness.Eventually(t, harness.GuestTimeout, func() error {
		if s := c.Status(); s.State != runtimeapi.ContainerState_CONTAINER_EXITED {
			return fmt.Errorf("state after the panic: got %v, want exited", s.State)
		}
		return nil
	})
	if s := c.Status(); s.Reason != "GuestPanic" || s.ExitCode == 0 {
		t.Errorf("status after the panic: got %v, want GuestPanic and an exit code other than 0", s)
	}
	deaf := d.RunVM(t, &harness.PodSpec{Name: "deaf", Image: harness.TinyDeaf})
	begin := time.Now()
	deaf.Stop(2 * time.Second)
	if took := time.Since(begin); took < 2*time.Second || took > 30*time.Second {
		t.Errorf("stop: took %v, want 2s to 30s", took)
	}
	deaf.WaitExit(137)
}

// TestV2NoAgent: a guest without an agent runs, and the error of exec says how to install an agent. If the pod asks to
// wait for the agent, the start waits only as long as the call.
func TestV2NoAgent(t *testing.T) {
	d := tinyVM(t)
	c := d.RunVM(t, &harness.PodSpec{Image: harness.TinyGuest})
	_, err := d.CRI().ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"true"}, Timeout: 10})
	wantCode(t, err, codes.Unimplemented)
	if err == nil || !strings.Contains(err.Error(), "TRIPODAGENT") {
		t.Errorf("exec without an agent: got error %v, want TRIPODAGENT in it", err)
	}
	pod := d.RunPodWith(t, harness.PodConfig(t, "waits", annotated("tripod.dev/vm.wait-for-agent", "true")), "vm")
	t.Cleanup(pod.Remove)
	waits := pod.Create(harness.ContainerConfig("c", harness.TinyGuest))
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	if _, err := d.CRI().StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: waits.ID}); err == nil {
		t.Error("StartContainer succeeded without an agent, want a timeout")
	}
}

func annotated(key, value string) harness.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		if c.Annotations == nil {
			c.Annotations = map[string]string{}
		}
		c.Annotations[key] = value
	}
}

// TestV3VMReboot: after a reboot of the node, the record still has the pod, the pod is not ready, and its resources are
// free.
func TestV3VMReboot(t *testing.T) {
	d := tinyVM(t)
	c := d.RunVM(t, &harness.PodSpec{Image: harness.TinyGuest})
	pid, netns := mainPid(t, d, c), filepath.Join(d.State, "netns", c.Pod.ID)
	d.Kill()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for _, mounted := range []string{netns, filepath.Dir(netns), filepath.Join(d.State, "vm", "pods", c.Pod.ID, "console"), d.State} {
		if err := syscall.Unmount(mounted, syscall.MNT_DETACH); err != nil && !errors.Is(err, syscall.EINVAL) {
			t.Fatal(err)
		}
	}
	if err := os.RemoveAll(d.State); err != nil {
		t.Fatal(err)
	}
	d.Start()
	if s := c.Pod.Status(); s.State != runtimeapi.PodSandboxState_SANDBOX_NOTREADY {
		t.Errorf("status of the pod: got %v, want not ready", s)
	}
	if s := c.Status(); s.State != runtimeapi.ContainerState_CONTAINER_EXITED || s.Reason != "Unknown" {
		t.Errorf("status of the container: got %v, want exited with reason Unknown", s)
	}
	next := d.RunVM(t, &harness.PodSpec{Name: "next", Image: harness.TinyGuest})
	next.WaitConsole("tick 00001")
}

// TestV3TapGone: a machine whose tap was removed cannot be started, and its status says why. A running machine keeps
// running without a network. Both can be stopped and removed, and leave nothing.
func TestV3TapGone(t *testing.T) {
	d := tinyVM(t)
	runs := d.RunVM(t, &harness.PodSpec{Name: "runs", Image: harness.TinyGuest})
	runs.WaitConsole("tick 00001")
	waits := d.RunPodWith(t, harness.PodConfig(t, "waits"), "vm")
	c := waits.Create(harness.ContainerConfig("c", harness.TinyGuest))
	for _, pod := range []*harness.Pod{runs.Pod, waits} {
		netns := filepath.Join(d.State, "netns", pod.ID)
		out, err := exec.CommandContext(t.Context(), "nsenter", "--net="+netns, "sh", "-c", "ip link del tap0; ip -o link").CombinedOutput()
		if err != nil || strings.Contains(string(out), "tap0") {
			t.Fatalf("remove the tap of %s: %v\n%s", pod.Config.Metadata.Name, err, out)
		}
	}
	_, err := d.CRI().StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: c.ID})
	if err == nil || !strings.Contains(err.Error(), "tap") {
		t.Errorf("start without its tap: got error %v, want tap in it", err)
	}
	if s := c.Status(); s.State != runtimeapi.ContainerState_CONTAINER_EXITED || s.Reason != "StartError" ||
		!strings.Contains(s.Message, "tap") {
		t.Errorf("status of the machine that did not start: got %v, want StartError because of the tap", s)
	}
	waits.Stop()
	waits.Remove()
	runs.WaitConsole(fmt.Sprintf("tick %05d", wantTicks(t, runs)+2))
	runs.Stop(30 * time.Second)
	runs.WaitExit(0)
}

// TestI5Disks: disks that refer to other files, and images that are not disks, are refused with the reason.
func TestI5Disks(t *testing.T) {
	d := tinyVM(t)
	for image, says := range map[string]string{harness.BackingDisk: "backing", harness.TwoDisks: "", harness.Busybox: ""} {
		_, err := d.Images().PullImage(t.Context(), &runtimeapi.ImageSpec{Image: image}, nil, nil)
		if err == nil {
			pod := d.RunPodWith(t, harness.PodConfig(t, "refused-"+filepath.Base(filepath.Dir(image))+says), "vm")
			config := harness.ContainerConfig("c", image)
			_, err = d.CRI().CreateContainer(t.Context(),
				&runtimeapi.CreateContainerRequest{PodSandboxId: pod.ID, Config: config, SandboxConfig: pod.Config})
			pod.Remove()
		}
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: got error %v, want %q in it", image, err, says)
		}
	}
}

// TestVMRefused: RunPodSandbox refuses settings that a machine cannot honour, and names them.
func TestVMRefused(t *testing.T) {
	d := tinyVM(t)
	for name, test := range map[string]struct {
		option harness.PodOption
		code   codes.Code
		says   string
	}{
		"annotation":   {annotated("VirtletVCPUCount", "many"), codes.InvalidArgument, "VirtletVCPUCount"},
		"host network": {harness.HostNetwork(), codes.Unimplemented, "network"},
		"host pid": {harness.Namespaces(func(n *runtimeapi.NamespaceOption) { n.Pid = runtimeapi.NamespaceMode_NODE }), codes.Unimplemented,
			"pid"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := d.CRI().RunPodSandbox(t.Context(),
				&runtimeapi.RunPodSandboxRequest{Config: harness.PodConfig(t, "refused", test.option), RuntimeHandler: "vm"})
			wantCode(t, err, test.code)
			if err == nil || !strings.Contains(err.Error(), test.says) {
				t.Errorf("error: got %v, want %q in it", err, test.says)
			}
		})
	}
	c := d.RunVM(t, &harness.PodSpec{Image: harness.TinyGuest})
	_, err := d.CRI().CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{
		PodSandboxId: c.Pod.ID, Config: harness.ContainerConfig("second", harness.TinyGuest), SandboxConfig: c.Pod.Config,
	})
	wantCode(t, err, codes.Unimplemented)
}

// TestVMRouted: a pod with Virtlet's annotation needs no RuntimeClass.
func TestVMRouted(t *testing.T) {
	d := tinyVM(t)
	pod := d.RunPod(t, harness.PodConfig(t, "routed", annotated("kubernetes.io/target-runtime", "virtlet.cloud"),
		annotated("VirtletVCPUCount", "2")))
	t.Cleanup(pod.Remove)
	if h := pod.Status().RuntimeHandler; h != "vm" {
		t.Errorf("handler: got %q, want vm", h)
	}
	c := pod.Run(harness.ContainerConfig("c", harness.TinyGuest))
	c.WaitConsole("tick 00001")
}
