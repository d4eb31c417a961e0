package e2e

import (
	"strings"
	"testing"
	"time"

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
	lv.Up()
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
