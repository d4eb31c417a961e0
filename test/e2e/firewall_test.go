package e2e

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// TestFirewall: host ports whose rules are flushed work again, and the events say so. A firewall that drops what pods send is
// a condition, and a finding of check, while it lasts.
func TestFirewall(t *testing.T) {
	d := harness.StartDaemon(t)
	p := startPod(t, d, ports(&runtimeapi.PortMapping{HostPort: 12070, ContainerPort: 80}))
	p.Run(httpd("web"))
	page := func() {
		t.Helper()
		if got := get(t, "http://127.0.0.1:12070"); !strings.Contains(got, itWorks) {
			t.Errorf("page: got %q, want %q in it", got, itWorks)
		}
	}
	page()
	d.Restart()
	for i := range 2 { // the chains of this pod only, because other tests have some too
		changeFirewall(t, `iptables -t nat -F $(iptables-save -t nat | sed -n 's/^-A \(CNI-DN-[0-9a-f]*\).* 12070 .*/\1/p' | head -1)`)
		page()
		harness.Eventually(t, 10*time.Second, func() error {
			out, err := tripod(t, d, "events").CombinedOutput()
			if n := strings.Count(string(out), "  restored   "); err != nil || n != i+1 ||
				!strings.Contains(string(out), "host ports of pod "+p.ID) {
				return fmt.Errorf("tripod events: got error %v and\n%s\nwant %d events about pod %s", err, out, i+1, p.ID)
			}
			return nil
		})
	}

	reported := func(want bool) {
		t.Helper()
		harness.Eventually(t, 15*time.Second, func() error {
			conditions, err := d.Conditions()
			if c := conditions["ForwardingReady"]; err != nil || (c != nil) != want ||
				c != nil && !strings.Contains(c.Message, "nft insert rule ip tripod-test forward") {
				return fmt.Errorf("condition ForwardingReady: got %v, error %v; want one: %v", c, err, want)
			}
			if ready := conditions["NetworkReady"]; !ready.GetStatus() {
				return fmt.Errorf("condition NetworkReady: got %v, want true", ready)
			}
			return nil
		})
		bin, err := harness.Binary()
		if err != nil {
			t.Fatal(err)
		}
		out, _ := exec.Command(bin, "check", "--config", d.ConfigPath()).CombinedOutput() // fails if anything else is wrong
		if strings.Contains(string(out), "nft insert rule ip tripod-test forward") != want {
			t.Errorf("tripod check: got\n%s\nwant the chain of nftables: %v", out, want)
		}
	}
	reported(false)
	// The first rule spares other tests.
	changeFirewall(t, "nft add table ip tripod-test; nft add chain ip tripod-test forward '{ type filter hook forward priority 0; }'; "+
		"nft add rule ip tripod-test forward accept; nft add rule ip tripod-test forward drop")
	t.Cleanup(func() { _ = exec.Command("nft", "delete", "table", "ip", "tripod-test").Run() })
	reported(true)
	changeFirewall(t, "nft delete table ip tripod-test")
	reported(false)
}

// changeFirewall runs a script that changes the firewall.
func changeFirewall(t *testing.T, script string) {
	t.Helper()
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
}
