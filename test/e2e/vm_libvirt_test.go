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

// TestVMLibvirt: the same machine as libvirt's domain, with libvirt's daemon and ours killed while it runs.
func TestVMLibvirt(t *testing.T) {
	lv := libvirtdtest.Start(t)
	t.Setenv("TRIPOD_VMWRAP_BIN", libvirtdtest.Wrapper(t))
	d := harness.StartDaemon(t, harness.VM(t), harness.Set("vm.driver", "libvirt"), harness.Set("vm.libvirt_uri", lv.URI))
	t.Cleanup(lv.Kill) // before the daemon looks for what was left behind, of which a libvirtd that was started again would be
	c := d.RunVM(t, &harness.PodSpec{Image: harness.Guest})
	if r := c.WaitGuest(); r.Seed != "nocloud" || r.Agent != "started" || !strings.HasPrefix(strings.Join(r.Addrs, ","), c.Pod.IP()+"/") {
		t.Errorf("the guest says %+v; the pod has %s", r, c.Pod.IP())
	}
	if page := c.Pod.Get("/"); !strings.Contains(page, "hello from vm") {
		t.Errorf("its page says %q", page)
	}
	waitAgent(t, d, c)

	lv.Kill()
	d.Kill()
	lv.Start()
	d.Start()
	waitAgent(t, d, c)
	if out := c.Must("sh", "-c", "cat /proc/uptime >/dev/null && echo still here"); out != "still here\n" {
		t.Errorf("after both daemons were killed a program says %q", out)
	}
	if page := c.Pod.Get("/"); !strings.Contains(page, "hello from vm") {
		t.Errorf("after both daemons were killed its page says %q", page)
	}
	c.Stop(30 * time.Second)
	if s := c.WaitExit(0); s.Reason != "Completed" {
		t.Errorf("stopped: %v", s)
	}
	c.Start()
	c.WaitGuestBoot(2)
}

// TestVMLibvirtAway: the daemon starts while libvirtd is away, serves all other pods, and says why machines take no orders; when
// libvirtd is there again, the machine that ran all the while is taken over, and the end of one that ended meanwhile is reported.
func TestVMLibvirtAway(t *testing.T) {
	lv := libvirtdtest.Start(t)
	t.Setenv("TRIPOD_VMWRAP_BIN", libvirtdtest.Wrapper(t))
	d := tinyVM(t, harness.Set("vm.driver", "libvirt"), harness.Set("vm.libvirt_uri", lv.URI))
	t.Cleanup(lv.Kill)
	runs := d.RunVM(t, &harness.PodSpec{Name: "runs", Image: harness.TinyGuest})
	runs.WaitConsole("tick 00002")
	ends := d.RunVM(t, &harness.PodSpec{Name: "ends", Image: harness.TinyGuest})
	ends.WaitConsole("tick 00002")
	pid := vmPid(t, d, ends)
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
		t.Errorf("the handler says %q, and %s", said, resp.Info["config"])
	}
	_, err = d.CRI().StopContainer(t.Context(), &runtimeapi.StopContainerRequest{ContainerId: runs.ID})
	wantWords(t, err, codes.Unavailable, "libvirtd cannot be reached")
	other := d.RunPod(t, harness.PodConfig(t, "linux")) // is served
	other.Remove()

	lv.Start()
	allReady(t, d)
	ends.WaitExit(137)
	before := len(runs.Logs())
	harness.Eventually(t, time.Minute, func() error {
		if n := len(runs.Logs()); n < before+2 {
			return fmt.Errorf("%d lines", n)
		}
		return nil
	})
	wantTicks(t, runs)
	runs.Stop(30 * time.Second)
	runs.WaitExit(0)
}

// handlersSay is the message of the condition HandlersReady, "" when it is not there; the others are true.
func handlersSay(t *testing.T, resp *runtimeapi.StatusResponse) (said string) {
	t.Helper()
	for _, c := range resp.Status.Conditions {
		switch {
		case c.Type == "HandlersReady":
			said = c.Message
		case !c.Status:
			t.Errorf("without libvirtd: %v", c)
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
				return fmt.Errorf("the condition is not true: %v", c)
			}
		}
		return nil
	})
}

// TestVMLibvirtDies: libvirtd dies, then hangs, while the daemon is up. The node's condition says so, what runs runs on and can be
// stopped, all other pods are served; once libvirtd is back the condition is gone and machines can be made, without a restart.
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
				return fmt.Errorf("the handler says %q, and %s", said, resp.Info["config"])
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
