package crash

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// hungPlugin writes a CNI plugin that assigns the lowest free address of 192.0.2.0/24. While the file hung exists, its
// DEL hangs before it releases the address.
func hungPlugin(t *testing.T, dir string) (hung, leases string) {
	t.Helper()
	hung, leases = filepath.Join(dir, "hung"), filepath.Join(dir, "leases")
	if err := os.MkdirAll(leases, 0o755); err != nil {
		t.Fatal(err)
	}
	plugin(t, dir, `cd `+leases+`
case $CNI_COMMAND in
ADD) n=1; until mkdir $n 2>/dev/null; do n=$((n+1)); done; : >$n/$CNI_CONTAINERID
	echo '{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","sandbox":"'$CNI_NETNS'"}],"ips":[{"address":"192.0.2.'$n'/24","interface":0}]}';;
DEL) [ -e `+hung+` ] && exec sleep 6545
	for f in */$CNI_CONTAINERID; do [ -e $f ] && rm -r ${f%/*}; done;;
esac
exit 0`)
	return hung, leases
}

// TestN4StartBesideHungPlugins: network plugins hang in DEL, for a pod that was being stopped and for a pod that is no
// longer in the record. Meanwhile the daemon starts and serves, keeps the addresses reserved, reports the leftovers in
// its status, and stops without waiting for the plugins. Once the plugins work, the daemon releases everything without
// another order.
func TestN4StartBesideHungPlugins(t *testing.T) {
	dir := filepath.Join(harness.Dir(), "hung")
	t.Cleanup(func() { os.RemoveAll(dir) })
	hung, leases := hungPlugin(t, dir)
	d := harness.StartDaemon(t, harness.Set("network.conf_dir", filepath.Join(dir, "net.d")),
		harness.Set("network.bin_dirs", []string{filepath.Join(dir, "bin")})) // the plugin timeout is the default, a minute
	kept, stopping, lost := d.RunPod(t, harness.PodConfig(t, "kept")), d.RunPod(t, harness.PodConfig(t, "stopping")),
		d.RunPod(t, harness.PodConfig(t, "lost"))
	c := kept.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
	taken := map[string]bool{kept.IP(): true, stopping.IP(): true, lost.IP(): true}

	// After the lost pod's removal the test restores its attachment and its lease, as if an older record had been
	// restored.
	attachment := filepath.Join(d.Root, "network", "attachments", lost.ID+".json")
	record, err := os.ReadFile(attachment)
	if err != nil {
		t.Fatal(err)
	}
	lease, err := filepath.Glob(filepath.Join(leases, "*", lost.ID))
	if err != nil || len(lease) != 1 {
		t.Fatalf("leases of the pod: got %v, error %v; want one", lease, err)
	}
	lost.Remove()
	if err := os.WriteFile(hung, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	go func() { // ends with the daemon
		_, _ = d.CRI().StopPodSandbox(context.Background(), &runtimeapi.StopPodSandboxRequest{PodSandboxId: stopping.ID})
	}()
	hangs := func(n int) []int {
		t.Helper()
		var found []int
		harness.Eventually(t, 20*time.Second, func() error {
			if found = pids(t, "sleep", "6545"); len(found) != n {
				return fmt.Errorf("hanging plugins: got %d, want %d", len(found), n)
			}
			return nil
		})
		return found
	}
	hangs(1)
	d.Kill()
	if err := errors.Join(os.Mkdir(filepath.Dir(lease[0]), 0o755), os.WriteFile(lease[0], nil, 0o644),
		os.WriteFile(attachment, record, 0o600)); err != nil {
		t.Fatal(err)
	}
	hangs(0) // plugins die with their daemon

	d.Start()
	before := hangs(2)
	c.Must("true")
	fresh := d.RunPod(t, harness.PodConfig(t, "new"))
	fresh.Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell("exit 3"))).WaitExit(3)
	if ip := fresh.IP(); taken[ip] {
		t.Errorf("address of the new pod: got %s, which another pod has not released", ip)
	}
	harness.Eventually(t, 30*time.Second, func() error {
		conditions, err := d.Conditions()
		if clean := conditions["Clean"]; err == nil && (clean == nil || clean.Status || !strings.HasPrefix(clean.Message, "leftovers: 2 ")) {
			err = fmt.Errorf("condition Clean: got %v, want false with 2 leftovers", clean)
		}
		return err
	})
	wantChecked(t, d, "could not be cleaned up yet")
	if now := hangs(2); fmt.Sprint(now) != fmt.Sprint(before) {
		t.Errorf("hanging plugins: got %v, want still %v", now, before)
	}
	d.Stop()
	if strings.Contains(d.DaemonLog(), "orders are still under way") {
		t.Error("the daemon's stop waited for the hanging plugins")
	}
	hangs(0)

	d.Start()
	hangs(2)
	for _, pid := range pids(t, "sleep", "6545") { // the plugins fail once, and then work
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Error(err)
		}
	}
	if err := os.Remove(hung); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, 60*time.Second, func() error {
		conditions, err := d.Conditions()
		left, _ := filepath.Glob(filepath.Join(leases, "*"))
		if clean := conditions["Clean"]; err == nil && (clean != nil || len(left) != 2) { // kept and new
			err = fmt.Errorf("got condition Clean %v, leases %v; want no condition and 2 leases", clean, left)
		}
		return err
	})
	for _, pod := range []*harness.Pod{kept, stopping, fresh} {
		pod.Remove()
	}
}
