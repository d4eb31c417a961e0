package e2e

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/test/harness"
)

// TestFaultC10FilledFilesOfAPod: a container without limits fills every file that the node provides. Afterwards a pod
// of each kind starts, the node's run directory has as much free space as before, and the daemon restarts.
func TestFaultC10FilledFilesOfAPod(t *testing.T) {
	run := filepath.Join(harness.Dir(), "c10-run")
	state := filepath.Join(run, "tripod")
	if err := errors.Join(os.MkdirAll(run, 0o755), unix.Mount("tmpfs", run, "tmpfs", 0, "size=24m")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(run, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	d := harness.StartDaemon(t, harness.Wasm(t, "node"), harness.VM(t), harness.Set("vm.default_memory", 32<<20),
		harness.Set("state", state), harness.Set("grpc.socket", state+"/tripod.sock"),
		func(d *harness.Daemon) { d.State, d.Socket = state, state+"/tripod.sock" })
	free := func() uint64 {
		t.Helper()
		var fs unix.Statfs_t
		if err := unix.Statfs(run, &fs); err != nil {
			t.Fatal(err)
		}
		return fs.Bavail * uint64(fs.Bsize)
	}
	before := free()
	attacker := d.RunPod(t, harness.PodConfig(t, "attacker")).Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
	for _, file := range []string{"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/dev/shm/x"} {
		if _, _, code := attacker.ExecSync("dd", "if=/dev/zero", "of="+file, "bs=1M", "count=200"); code == 0 {
			t.Errorf("write of 200 MiB to %s succeeded, want an error", file)
		}
	}
	eachKind := func() {
		t.Helper()
		d.RunPod(t, harness.PodConfig(t, "linux")).Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep())).Must("true")
		d.RunWasm(t, &harness.PodSpec{Image: harness.GreeterC})
		d.RunVM(t, &harness.PodSpec{Image: harness.TinyGuest}).WaitConsole("tick 00001")
		if err := d.RemoveAllPods(); err != nil {
			t.Error(err)
		}
	}
	if now := free(); before-min(now, before) > 1<<20 {
		t.Errorf("free space in the run directory: got %d bytes, was %d", now, before)
	}
	eachKind()
	attacker = d.RunPod(t, harness.PodConfig(t, "again")).Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
	_, _, _ = attacker.ExecSync("dd", "if=/dev/zero", "of=/etc/hostname", "bs=1M", "count=200")
	d.Kill()
	d.Start()
	attacker.Must("true")
	eachKind()
}
