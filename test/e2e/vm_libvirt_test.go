package e2e

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/libvirtdtest"
)

// TestVMLibvirt: a machine runs as a libvirt domain, and survives kills of libvirtd and of the daemon.
func TestVMLibvirt(t *testing.T) {
	lv := libvirtdtest.Start(t)
	t.Setenv("TRIPOD_VMWRAP_BIN", libvirtdtest.Wrapper(t))
	d := harness.StartDaemon(t, harness.VM(t), harness.Set("vm.driver", "libvirt"), harness.Set("vm.libvirt_uri", lv.URI))
	t.Cleanup(lv.Kill) // before the harness checks for leftover processes, among which a restarted libvirtd would be
	c := d.RunVM(t, &harness.PodSpec{Image: harness.Guest})
	if r := c.WaitGuest(); r.Seed != "nocloud" || r.Agent != "started" || !strings.HasPrefix(strings.Join(r.Addrs, ","), c.Pod.IP()+"/") {
		t.Errorf("report of the guest: got %+v, want seed nocloud, a started agent and the address %s", r, c.Pod.IP())
	}
	if page := c.Pod.Get("/"); !strings.Contains(page, "hello from vm") {
		t.Errorf("page of the guest: got %q, want \"hello from vm\"", page)
	}
	waitAgent(t, d, c)

	lv.Kill()
	d.Kill()
	lv.Start()
	d.Start()
	waitAgent(t, d, c)
	if out := c.Must("sh", "-c", "cat /proc/uptime >/dev/null && echo still here"); out != "still here\n" {
		t.Errorf("exec after the kills: got %q, want \"still here\"", out)
	}
	if page := c.Pod.Get("/"); !strings.Contains(page, "hello from vm") {
		t.Errorf("page of the guest after the kills: got %q, want \"hello from vm\"", page)
	}
	c.Stop(30 * time.Second)
	if s := c.WaitExit(0); s.Reason != "Completed" {
		t.Errorf("status after the stop: got %v, want Completed", s)
	}
	c.Start()
	c.WaitGuestBoot(2)
}

// TestVMLibvirtAway: the daemon starts while libvirtd is down, serves all other pods, and reports why machines take no
// orders. Once libvirtd is up, the daemon adopts the running machine and reports the end of a machine that ended
// meanwhile.
func TestVMLibvirtAway(t *testing.T) {
	lv := libvirtdtest.Start(t)
	t.Setenv("TRIPOD_VMWRAP_BIN", libvirtdtest.Wrapper(t))
	d := tinyVM(t, harness.Set("vm.driver", "libvirt"), harness.Set("vm.libvirt_uri", lv.URI))
	t.Cleanup(lv.Kill)
	runs := d.RunVM(t, &harness.PodSpec{Name: "runs", Image: harness.TinyGuest})
	runs.WaitConsole("tick 00002")
	ends := d.RunVM(t, &harness.PodSpec{Name: "ends", Image: harness.TinyGuest})
	ends.WaitConsole("tick 00002")
	pid := mainPid(t, d, ends)
	lv.Kill()
	d.Kill()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	d.Start()
	resp, err := d.CRI().Status(t.Context(), &runtimeapi.StatusRequest{Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	said := handlersSay(t, resp)
	if !strings.Contains(said, "libvirtd cannot be reached") || !strings.Contains(resp.Info["config"], "libvirtd cannot be reached") {
		t.Errorf("message of HandlersReady: got %q, want \"libvirtd cannot be reached\", also in %s", said, resp.Info["config"])
	}
	_, err = d.CRI().StopContainer(t.Context(), &runtimeapi.StopContainerRequest{ContainerId: runs.ID})
	wantWords(t, err, codes.Unavailable, "libvirtd cannot be reached")
	other := d.RunPod(t, harness.PodConfig(t, "linux")) // works without libvirtd
	other.Remove()

	lv.Start()
	allReady(t, d)
	ends.WaitExit(137)
	before := len(runs.Logs())
	harness.Eventually(t, time.Minute, func() error {
		if n := len(runs.Logs()); n < before+2 {
			return fmt.Errorf("lines in the log: got %d, want at least %d", n, before+2)
		}
		return nil
	})
	wantTicks(t, runs)
	runs.Stop(30 * time.Second)
	runs.WaitExit(0)
}

// handlersSay returns the message of the condition HandlersReady, or "" if it is missing. All other conditions must be
// true.
func handlersSay(t *testing.T, resp *runtimeapi.StatusResponse) (said string) {
	t.Helper()
	for _, c := range resp.Status.Conditions {
		switch {
		case c.Type == "HandlersReady":
			said = c.Message
		case !c.Status:
			t.Errorf("condition without libvirtd: got %v, want true", c)
		}
	}
	return said
}

// allReady waits until every condition of the node is true.
func allReady(t *testing.T, d *harness.Daemon) {
	t.Helper()
	harness.Eventually(t, time.Minute, func() error {
		resp, err := d.CRI().Status(t.Context(), &runtimeapi.StatusRequest{})
		if err != nil {
			return err
		}
		for _, c := range resp.Status.Conditions {
			if !c.Status {
				return fmt.Errorf("condition: got %v, want true", c)
			}
		}
		return nil
	})
}

// TestVMLibvirtDies: libvirtd dies, then hangs, while the daemon runs. The node's condition reports it, running
// machines keep running and can be stopped, and other pods work. Once libvirtd is up again, the condition disappears
// and new machines can be created, without a restart of the daemon.
func TestVMLibvirtDies(t *testing.T) {
	lv := libvirtdtest.Start(t)
	t.Setenv("TRIPOD_VMWRAP_BIN", libvirtdtest.Wrapper(t))
	d := tinyVM(t, harness.Set("vm.driver", "libvirt"), harness.Set("vm.libvirt_uri", lv.URI))
	t.Cleanup(lv.Kill)
	stays := d.RunVM(t, &harness.PodSpec{Name: "stays", Image: harness.TinyGuest})
	stops := d.RunVM(t, &harness.PodSpec{Name: "stops", Image: harness.TinyGuest})
	stays.WaitConsole("tick 00002")
	stops.WaitConsole("tick 00002")
	allReady(t, d)
	notReady := func(says string) {
		t.Helper()
		harness.Eventually(t, time.Minute, func() error {
			resp, err := d.CRI().Status(t.Context(), &runtimeapi.StatusRequest{Verbose: true})
			if err != nil {
				return err
			}
			if said := handlersSay(t, resp); !strings.Contains(said, says) || !strings.Contains(resp.Info["config"], says) {
				return fmt.Errorf("message of HandlersReady: got %q, want %q, also in %s", said, says, resp.Info["config"])
			}
			return nil
		})
	}
	lv.Kill()
	notReady("libvirtd cannot be reached")
	pod := d.RunPodWith(t, harness.PodConfig(t, "next"), "vm")
	_, err := d.CRI().CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{
		PodSandboxId: pod.ID, Config: harness.ContainerConfig("c", harness.TinyGuest), SandboxConfig: pod.Config,
	})
	wantWords(t, err, codes.Unavailable, "libvirtd cannot be reached")
	stops.Stop(0)
	stops.WaitExit(137)
	other := d.RunPod(t, harness.PodConfig(t, "linux"))
	other.Remove()

	lv.Start()
	allReady(t, d)
	next := pod.Run(harness.ContainerConfig("c", harness.TinyGuest))
	next.WaitConsole("tick 00002")
	pod.Remove()

	lv.Signal(syscall.SIGSTOP)
	notReady("libvirtd does not answer")
	lv.Signal(syscall.SIGCONT)
	allReady(t, d)
	stays.Stop(30 * time.Second)
	stays.WaitExit(0)
	wantTicks(t, stays)
}
