package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/test/harness"
)

// TestSyncedWrites holds the number of writes for which a Linux pod waits in its life: RunPodSandbox, CreateContainer,
// StartContainer and what undoes them, with a network.
func TestSyncedWrites(t *testing.T) {
	const lives, most = 5, 20
	address := harness.FreeAddress(t)
	d := harness.StartDaemon(t, harness.Set("metrics.address", address))
	life := func(name string) {
		p := d.RunPod(t, harness.PodConfig(t, name))
		c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
		c.Stop(10 * time.Second)
		c.Remove()
		p.Stop()
		p.Remove()
	}
	synced := func() (n float64) {
		t.Helper()
		_, figure, _ := strings.Cut(get(t, "http://"+address+"/metrics"), "\ntripod_synced_writes_total ")
		if _, err := fmt.Sscan(figure, &n); err != nil {
			t.Fatalf("tripod_synced_writes_total: %v", err)
		}
		return n
	}
	life("first") // pulls the image
	before := synced()
	for i := range lives {
		life(fmt.Sprint("p", i))
	}
	each := (synced() - before) / lives
	t.Logf("%.1f synced writes for each pod", each)
	if each > most || each < 4 {
		t.Errorf("%.1f synced writes for each pod, want at most %d, and some", each, most)
	}
}
