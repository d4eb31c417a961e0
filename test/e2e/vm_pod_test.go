package e2e

import (
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// TestVMPod: a machine from an image with a kernel boots, is reachable at its pod's address and at a forwarded port,
// runs programs through its agent, obeys its power button, and starts again in the same sandbox.
func TestVMPod(t *testing.T) {
	d := harness.StartDaemon(t, harness.VM(t))
	c := d.RunVM(t, &harness.PodSpec{Image: harness.Guest})
	if r := c.WaitGuest(); r.Host != "vm" || r.Seed != "nocloud" || r.Agent != "started" ||
		!strings.HasPrefix(strings.Join(r.Addrs, ","), c.Pod.IP()+"/") {
		t.Errorf("report of the guest: got %+v, want host vm, seed nocloud, a started agent and the address %s", r, c.Pod.IP())
	}
	if page := c.Pod.Get("/"); !strings.Contains(page, "hello from vm") {
		t.Errorf("page of the guest: got %q, want \"hello from vm\"", page)
	}
	waitAgent(t, d, c)
	if out := c.Must("sh", "-c", "echo $((6*7)); hostname"); out != "42\nvm\n" {
		t.Errorf("output of a program: got %q, want 42 and vm", out)
	}
	if _, _, code := c.ExecSync("sh", "-c", "exit 9"); code != 9 {
		t.Errorf("exit code: got %d, want 9", code)
	}
	if !strings.Contains(get(t, "http://"+c.Pod.Forward(t, 80)+"/"), "hello from vm") {
		t.Error("page at the forwarded port: want \"hello from vm\"")
	}
	request := tripod(t, d, "port-forward", c.Pod.ID, "80", "--stdio")
	request.Stdin = strings.NewReader("GET / HTTP/1.0\r\n\r\n")
	if page, err := request.Output(); err != nil || !strings.Contains(string(page), "hello from vm") {
		t.Errorf("page by port-forward --stdio: got %q, error %v; want \"hello from vm\"", page, err)
	}
	ip := c.Pod.IP()
	c.Stop(30 * time.Second)
	if s := c.WaitExit(0); s.Reason != "Completed" {
		t.Errorf("status after the stop: got %v, want Completed", s)
	}
	c.Start()
	c.WaitGuestBoot(2)
	if c.Pod.IP() != ip || !strings.Contains(c.Pod.Get("/"), "hello from vm") {
		t.Errorf("after the second start: got address %s, want %s and the guest's page", c.Pod.IP(), ip)
	}
}

// waitAgent waits until the guest's agent can run programs.
func waitAgent(t *testing.T, d *harness.Daemon, c *harness.Container) {
	t.Helper()
	harness.Eventually(t, harness.GuestTimeout, func() error {
		_, err := d.CRI().ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"true"}, Timeout: 10})
		return err
	})
}
