package attack

import (
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// TestMachine: the attacker is root in the guest.
func TestMachine(t *testing.T) {
	g := open(t)
	parent := g.d.CgroupParent + "/attackers"
	g.limitPids(t, parent)
	c := g.d.RunVM(t, &harness.PodSpec{
		Name: "attacker-vm", Image: harness.Guest,
		Pod: []harness.PodOption{func(c *runtimeapi.PodSandboxConfig) { c.Linux.CgroupParent = parent }},
		Container: []harness.ContainerOption{func(c *runtimeapi.ContainerConfig) {
			c.Linux.Resources = &runtimeapi.LinuxContainerResources{CpuQuota: 50_000, CpuPeriod: 100_000}
		}},
	})
	c.WaitGuest()
	g.agent(t, c)
	for _, a := range []struct{ name, script string }{
		{"console", "(yes $(head -c 500 /dev/zero | tr '\\0' x) >/dev/console) & sleep 2; kill $!"},
		{"processor", "for i in 1 2 3 4; do (while :; do :; done) & done; sleep 2; kill $(jobs -p)"},
		{"memory", "dd if=/dev/zero of=/tmp/fill bs=1M; rm /tmp/fill"},
		{"network", "for i in $(seq 1 40); do nc -w 1 10.0.0.$i 80 </dev/null & arping -c 1 -A -I eth0 $(ip route | awk '/default/ {print $3}') & done; wait"},
	} {
		g.attack(a.name, func(t *testing.T) {
			g.shell(t, c, a.script)
			g.agent(t, c)
		})
	}
	g.attack("reboots", func(t *testing.T) {
		g.shell(t, c, "reboot -f")
		g.agent(t, c)
	})
	g.attack("agent", func(t *testing.T) {
		// Only the agent can open the port. The script kills it once this command has returned; it is not restarted.
		g.shell(t, c, "(trap '' HUP TERM; sleep 1; kill -9 $(pidof tripod-agent); for p in /dev/vport*; do head -c 10000000 /dev/urandom >$p & done; sleep 5) >/dev/null 2>&1 &")
		g.shell(t, c, "true")
		g.wantReason(t, c)
	})
	// The guest writes garbage to all devices that it can reach, which may end it.
	g.attack("devices", func(t *testing.T) {
		g.shell(t, c, "reboot -f")
		g.shell(t, c, "for d in /sys/bus/pci/devices/*/config; do head -c 256 /dev/urandom >$d; done; for p in /dev/mem /dev/port; do head -c 65536 /dev/urandom >$p; done")
		g.wantReason(t, c)
	})
	c.Stop(time.Second)
	c.WaitState(runtimeapi.ContainerState_CONTAINER_EXITED)
}

// shell runs a script in the guest. The script may fail.
func (g *ground) shell(t *testing.T, c *harness.Container, script string) {
	_, err := g.d.CRI().ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"sh", "-c", script}, Timeout: 10})
	t.Logf("%s: %v", script, err)
}

// wantReason checks that the machine is running or has ended with a reason.
func (g *ground) wantReason(t *testing.T, c *harness.Container) {
	t.Helper()
	if s := c.Status(); s.State != runtimeapi.ContainerState_CONTAINER_RUNNING && s.Reason == "" {
		t.Errorf("status of the machine: got %v, want running or a reason", s)
	}
}

// agent waits until the guest's agent can run a command.
func (g *ground) agent(t *testing.T, c *harness.Container) {
	t.Helper()
	harness.Eventually(t, harness.GuestTimeout, func() error {
		_, err := g.d.CRI().ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"true"}, Timeout: 5})
		return err
	})
}
