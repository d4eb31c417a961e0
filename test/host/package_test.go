package host

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/test/until"
)

// openEdgeDoor turns the edge door and the packaged orchestrator on.
func openEdgeDoor(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		node.run(t, `systemctl disable --now --quiet tripod-orchestrator; mv /root/config.toml /etc/tripod/; rm -rf /var/lib/tripod-orchestrator; systemctl restart tripod`)
	})
	node.run(t, `cp /etc/tripod/config.toml /root/ && printf '[wasm]\ncompile_timeout = "10m"\n[edge]\nenabled = true\nmodule_roots = ["/payload/examples/edge"]\n' >>/etc/tripod/config.toml
	systemctl restart tripod && systemctl enable --now --quiet tripod-orchestrator`)
}

// TestReboot: after a reboot of the host, the daemon is up again and knows the pods, whose containers have ended with it. A
// module of the edge door that is to be restarted runs again. Nothing of them is left once they are removed.
func TestReboot(t *testing.T) {
	openEdgeDoor(t)
	names := runThree(t, "")
	wantReady(t, names...)
	node.run(t, "tripod edge run --timeout 4m /payload/examples/edge/ticker-go/ticker.wasm --name ticker --restart always --channel out=demo/tick:w && timeout 60 tripod edge sub --count 2 demo/tick")
	node.reboot(t)
	node.run(t, "timeout 120 sh -c 'until tripod info >/dev/null 2>&1; do sleep 0.5; done'")
	pods, containers := node.run(t, "tripod pods"), node.run(t, "tripod ps --all")
	for _, name := range names {
		if !strings.Contains(pods, name) || strings.Count(pods, "NotReady") != len(names) {
			t.Errorf("pods after the reboot: got\n%s\nwant %s, not ready", pods, name)
		}
		if !strings.Contains(containers, name) || strings.Count(containers, "Exited") != len(names) {
			t.Errorf("containers after the reboot: got\n%s\nwant that of %s, exited", containers, name)
		}
	}
	node.run(t, "timeout 120 tripod edge sub --count 2 demo/tick && tripod edge ps && tripod edge stop ticker")
	if log := node.run(t, "journalctl --boot --quiet --no-pager --unit tripod --priority warning; journalctl --boot --quiet --no-pager --unit tripod | grep level=ERROR || true"); log != "" {
		t.Errorf("warnings and errors of the boot:\n%s", log)
	}
	node.run(t, "tripod rmp --all --force")
	left := node.run(t, `find /sys/fs/cgroup/tripod.slice -type d -name 'tripod-*' ! -name 'tripod-vm.slice' ! -path '*/tripod-helpers.service*'
	grep tripod /proc/self/mountinfo | cut -d' ' -f5 | grep -vxE '/run/tripod|/run/tripod/netns'; ip -o link | grep veth; ls -A /run/tripod/netns; ls -A /var/lib/tripod/linux; pgrep -x conmon; pgrep -x qemu-system-x86; true`)
	if left != "" {
		t.Errorf("left after the reboot, when the pods are removed:\n%s", left)
	}
	wantReady(t, runThree(t, "-again")...)
}

// TestUpgrade: installing the package again restarts the daemon. Pods run on, and no request to one fails meanwhile.
func TestUpgrade(t *testing.T) {
	names := runThree(t, "")
	processes := "pgrep -x nginx; pgrep -x tripod-wasm; pgrep -x qemu-system-x86"
	before := node.run(t, "%s", processes)
	wantTraffic(t, "web")
	node.run(t, `web=$(tripod inspectp web | jq -r .status.network.ip)
	cat >/root/load.sh <<L
	while [ -e /root/load ]; do curl --silent --show-error --fail --max-time 20 http://$web/ >/dev/null || echo failed; echo done; done
L
	touch /root/load; bash /root/load.sh >/root/load.log 2>&1 &`)
	node.run(t, "dpkg --install /payload/tripod.deb; dpkg --install /payload/tripod.deb")
	wantReady(t, names...)
	out := node.run(t, "rm /root/load; while pgrep -f '^bash /root/load.sh' >/dev/null; do sleep 0.1; done; cat /root/load.log")
	if strings.Contains(out, "failed") || strings.Count(out, "done") < 20 {
		t.Errorf("requests during two upgrades: %d, log:\n%.2000s", strings.Count(out, "done"), strings.ReplaceAll(out, "done\n", ""))
	}
	if after := node.run(t, "%s", processes); after != before {
		t.Errorf("processes of the pods: got %q after two upgrades, want %q", after, before)
	}
}

// TestPurge: the package refuses to go while pods run. A purge then leaves nothing, and the package can be installed again.
func TestPurge(t *testing.T) {
	runThree(t, "")
	if out, err := node.try(t, "dpkg --purge tripod"); err == nil || !strings.Contains(out, "pods are running") {
		t.Errorf("purge with running pods: got error %v, want a refusal:\n%s", err, out)
	}
	node.run(t, "tripod rmp --all --force; dpkg --purge tripod")
	left := node.run(t, `systemctl list-units --all --plain --no-legend 'tripod*' | grep -v '^tripod.*slice'; systemctl list-unit-files 'tripod*' --no-legend
	find /etc /usr /run /var/lib /sys/fs/cgroup -name '*tripod*' ! -path '/usr/share/doc/*' ! -path '/var/lib/dpkg/*' ! -path '/etc/tripod*' ! -name 'tripod*.slice' ! -path '/run/systemd/*' 2>/dev/null
	grep tripod /proc/self/mountinfo; for p in tripod tripod-wasm conmon qemu-system-x86 sleep; do pgrep -lx $p; done; true`)
	if left != "" {
		t.Errorf("left after the purge:\n%s", left)
	}
	node.run(t, "%s", prepare)
	wantReady(t, runThree(t, "-new")...)
}

// wantTraffic checks that a pod answers the node by HTTP.
func wantTraffic(t *testing.T, pod string) {
	t.Helper()
	node.run(t, "curl --silent --show-error --fail --max-time 20 --retry 5 --retry-connrefused http://$(tripod inspectp %s | jq -r .status.network.ip)/", pod)
}

// TestNetworkd: the configuration of systemd-networkd matches every Ethernet link, as that of this host does, and pods have
// their network in spite of that, also after networkd has read it again.
func TestNetworkd(t *testing.T) {
	runThree(t, "")
	wantTraffic(t, "web")
	node.run(t, "networkctl reload; systemctl restart systemd-networkd")
	wantTraffic(t, "web")
	if out := node.run(t, "networkctl --no-pager --no-legend list 'veth*' tripod0"); strings.Count(out, "unmanaged") != strings.Count(out,
		"\n") || out == "" {
		t.Errorf("networkd manages links of pods:\n%s", out)
	}
}

// reboot boots the machine again.
func (g *guest) reboot(t testing.TB) {
	t.Helper()
	before := g.run(t, bootID)
	_, _ = g.try(t, "systemctl reboot") // the connection can end first
	until.Within(t, bootTime, "the host has booted again", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second) // a connection to a host that goes down hangs
		defer cancel()
		now, err := g.command(ctx, bootID, nil)
		return err == nil && now != before
	})
	if err := g.waitBoot(bootTime); err != nil {
		t.Fatal(err)
	}
}

const bootID = "cat /proc/sys/kernel/random/boot_id"
