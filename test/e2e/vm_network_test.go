package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// TestVMTraffic: a machine and a pod of another backend ping each other without loss, and transfer 50 MB each way by
// HTTP. The machine reaches itself by its own address, and by its host port through the bridge (hairpin).
func TestVMTraffic(t *testing.T) {
	const size, hostPort = 50_000_000, 12010
	d := harness.StartDaemon(t, harness.VM(t))
	d.Pull(t, harness.Busybox)
	pod := startPod(t, d)
	c := pod.Run(harness.ContainerConfig("web", harness.Busybox, harness.Command("sh", "-c",
		fmt.Sprintf("mkdir /tmp/www && head -c %d /dev/urandom >/tmp/www/blob && sha256sum </tmp/www/blob >/tmp/www/sum && exec httpd -f -p 80 -h /tmp/www", size))))
	m := d.RunVM(t, &harness.PodSpec{Image: harness.Guest,
		Pod: []harness.PodOption{ports(&runtimeapi.PortMapping{HostPort: hostPort, ContainerPort: 80})}})
	m.WaitGuest()
	waitAgent(t, d, m)
	for _, ping := range []struct {
		from *harness.Container
		to   string
	}{{m, pod.IP()}, {c, m.Pod.IP()}, {m, nodeAddress(t, d)}} {
		if out := ping.from.Must("ping", "-c", "20", "-i", "0.1", "-q", ping.to); !strings.Contains(out, "20 packets received") {
			t.Errorf("ping to %s: got %q, want 20 packets received", ping.to, out)
		}
	}
	harness.Eventually(t, time.Minute, func() error {
		if out, _, code := c.ExecSync("wget", "-q", "-O-", "http://127.0.0.1/sum"); code != 0 || len(out) < 64 {
			return fmt.Errorf("answer of the pod's server: got %q, want a checksum", out)
		}
		return nil
	})
	sum := c.Must("cat", "/tmp/www/sum")
	began := time.Now()
	if got := m.Must("sh", "-c", "wget -q -O- http://"+pod.IP()+"/blob | sha256sum"); got != sum {
		t.Errorf("checksum in the guest: got %q, want %q", got, sum)
	}
	t.Logf("%d bytes from the pod to the guest in %s", size, time.Since(began))
	began = time.Now()
	if got := c.Must("sh", "-c",
		fmt.Sprintf("wget -q -O- http://%s/cgi-bin/blob?%d | wc -c", m.Pod.IP(), size)); strings.TrimSpace(got) != fmt.Sprint(size) {
		t.Errorf("bytes received by the pod: got %s, want %d", got, size)
	}
	t.Logf("%d bytes from the guest to the pod in %s", size, time.Since(began))
	for from, page := range map[string]string{
		"the guest by its own address":   m.Must("wget", "-q", "-O-", "http://"+m.Pod.IP()+"/"),
		"the guest by its host port":     m.Must("wget", "-q", "-O-", fmt.Sprintf("http://%s:%d/", nodeAddress(t, d), hostPort)),
		"the pod by the host port":       c.Must("wget", "-q", "-O-", fmt.Sprintf("http://%s:%d/", nodeAddress(t, d), hostPort)),
		"the node by its own host port":  get(t, fmt.Sprintf("http://%s:%d/", nodeAddress(t, d), hostPort)),
		"the node's loopback, host port": get(t, fmt.Sprintf("http://127.0.0.1:%d/", hostPort)),
	} {
		if !strings.Contains(page, "hello from vm") {
			t.Errorf("page from %s: got %q, want \"hello from vm\"", from, page)
		}
	}
}
