package e2e

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// overwrite is a script that repeatedly tries to write to the program of every process that the container sees,
// including the OCI runtime when it enters the container.
const overwrite = `while :; do for p in /proc/[0-9]*; do [ "$p" = /proc/$$ ] || { printf x >$p/exe; } 2>/dev/null; done; done`

// TestC6RuntimeBinaryIsSealed: a container whose programs are /proc/self/exe, and that writes to all programs that run
// in it, cannot change the OCI runtime on the node. The test uses copies of the runtimes, in case it can.
func TestC6RuntimeBinaryIsSealed(t *testing.T) {
	for _, name := range []string{"crun", "runc"} {
		t.Run(name, func(t *testing.T) {
			found, err := exec.LookPath(name)
			if err != nil {
				t.Fatal(err)
			}
			program, err := os.ReadFile(found)
			if err != nil {
				t.Fatal(err)
			}
			dir := filepath.Join(harness.Dir(), "sealed-"+name)
			t.Cleanup(func() { os.RemoveAll(dir) })
			path := filepath.Join(dir, name)
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, program, 0o755); err != nil {
				t.Fatal(err)
			}
			d := harness.StartDaemon(t, harness.Set("linux.runtime", path))
			p := d.RunPod(t, harness.PodConfig(t, "p"))
			c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell(overwrite)))
			for range 30 {
				_, _ = d.CRI().ExecSync(context.Background(),
					&runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"/proc/self/exe", "--version"}, Timeout: 10})
			}
			c.Must("true") // the runtime still works
			c.Stop(0)
			p.Remove()
			after, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(program, after) {
				t.Error("the container changed the OCI runtime")
			}
		})
	}
}
