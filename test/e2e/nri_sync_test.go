package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// testNRISynchronize creates containers before, during and after the synchronisation of a plugin. The plugin must learn of
// each exactly once.
func testNRISynchronize(t *testing.T, d *harness.Daemon, during int) {
	connectPlugin(t, d, "00", "first", &nriPlugin{})
	p := startPod(t, d)
	var ids []string
	var mu sync.Mutex
	run := func(name string) {
		id, err := create(d, p, harness.ContainerConfig(name, harness.Busybox, harness.Sleep()))
		if err == nil {
			err = d.Runtime().StartContainer(context.Background(), id)
		}
		mu.Lock()
		defer mu.Unlock()
		if ids = append(ids, id); err != nil {
			t.Errorf("run %s: %v", name, err)
		}
	}
	run("before-1")
	run("before-2")
	release := make(chan struct{})
	late := connectPlugin(t, d, "10", "late", &nriPlugin{onSync: func(context.Context) { <-release }})
	var wg sync.WaitGroup
	for i := range during {
		wg.Go(func() { run(fmt.Sprintf("during-%d", i)) })
	}
	harness.Eventually(t, waitLimit, func() error { // the daemon prepares the containers and then waits for the plugin
		bundles, err := filepath.Glob(filepath.Join(d.Root, "linux", p.ID, "*", "rootfs"))
		if len(bundles) < 2+during {
			return fmt.Errorf("bundles: got %d, error %v; want %d", len(bundles), err, 2+during)
		}
		return nil
	})
	close(release)
	wg.Wait()
	run("after-1")
	for _, id := range ids {
		harness.Eventually(t, waitLimit, func() error {
			if n := late.seen(id); n != 1 {
				return fmt.Errorf("the late plugin learned %d times of container %s, want once", n, id)
			}
			return nil
		})
	}
}

func daemonInfo(t *testing.T, d *harness.Daemon) string {
	t.Helper()
	resp, err := d.CRI().Status(context.Background(), &runtimeapi.StatusRequest{Verbose: true})
	if err != nil {
		t.Fatal(err)
	}
	return resp.Info["config"]
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
