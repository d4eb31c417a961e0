package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/until"
)

// templates returns the directories of the node's templates, without those that are being made.
func templates(t *testing.T, d *harness.Daemon) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(d.Root, "vm-oci", "templates", "[0-9a-f]*"))
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// identity are what must differ between machines that continue from the same template.
var identity = []string{"cat /proc/sys/kernel/random/boot_id", "cat /sys/class/net/eth0/address", "hostname", "hostname -i",
	"head -c 32 /dev/urandom | sha256sum"}

// TestVMOCITemplates: the first pod boots its machine and leaves a template. The next pods, of other sizes, continue from it,
// and each has its own identity, random numbers, network and volumes, and the right time. One that cannot continue boots; its
// template is removed only if it is damaged.
func TestVMOCITemplates(t *testing.T) {
	d := harness.StartDaemon(t, harness.VMOCITemplates(t))
	sizes := map[string]int64{"two": 900, "three": 70} // MiB
	run := func(name string, options ...harness.ContainerOption) *harness.Container {
		began := time.Now()
		p := d.RunPodWith(t, harness.PodConfig(t, name, func(c *runtimeapi.PodSandboxConfig) {
			c.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: sizes[name] << 20}
		}), harness.OCIHandler)
		ready := time.Now()
		c := p.Run(harness.ContainerConfig("main", harness.Busybox, append(options, harness.Shell("echo ready; exec sleep 3600"))...))
		c.WaitLog("ready")
		t.Logf("pod %s: sandbox after %s, line after %s", name, ready.Sub(began).Round(time.Millisecond),
			time.Since(began).Round(time.Millisecond))
		return c
	}
	run("cold")
	until.Within(t, harness.GuestTimeout, "a template is made", func() bool { return strings.Contains(d.DaemonLog(), "made a template") })
	volume := t.TempDir()
	containers := []*harness.Container{run("one"), run("two"), run("three", func(c *runtimeapi.ContainerConfig) {
		c.Mounts = []*runtimeapi.Mount{{ContainerPath: "/data", HostPath: volume}}
	})}
	containers[2].Must("sh", "-c", "echo from a template >/data/file")
	if got, err := os.ReadFile(filepath.Join(volume, "file")); err != nil || string(got) != "from a template\n" {
		t.Errorf("file in the volume: got %q, error %v", got, err)
	}
	for name, c := range map[string]*harness.Container{"two": containers[1], "three": containers[2]} {
		if got, least := memTotal(t, c), sizes[name]+150; got < least || got > least+42 {
			t.Errorf("the machine of pod %s, whose limit is %d MiB: got %d MiB, want a little more than %d", name, sizes[name], got, least)
		}
	}
	seen := map[string]string{}
	for i, c := range containers {
		before := time.Now().Truncate(time.Second)
		if now := clock(t, c); now.Before(before) || now.After(time.Now()) {
			t.Errorf("clock of machine %d: got %s, want a time between %s and %s", i, now, before, time.Now())
		}
		for _, command := range identity {
			out := c.Must("sh", "-c", command)
			if before, ok := seen[command+out]; ok || strings.TrimSpace(out) == "" {
				t.Errorf("machine %d: %s says %q, as %s does", i, command, out, before)
			}
			seen[command+out] = fmt.Sprint("machine ", i)
		}
	}
	if log := d.DaemonLog(); strings.Contains(log, "boots instead") {
		t.Errorf("a machine did not continue from the template; log: %s", log)
	}
	d.Restart("TRIPOD_FAILPOINTS=qemu.start.filled=1*error")
	run("unlucky")
	if log := d.DaemonLog(); strings.Count(log, "boots instead") != 1 || len(templates(t, d)) != 1 {
		t.Errorf("a machine whose start failed once: got templates %v, want that it booted and that its template is kept", templates(t, d))
	}
	state := filepath.Join(templates(t, d)[0], "state")
	if err := os.Truncate(state, 1000); err != nil {
		t.Fatal(err)
	}
	run("damaged")
	if log := d.DaemonLog(); strings.Count(log, "boots instead") != 2 || len(templates(t, d)) != 0 {
		t.Errorf("a damaged template: got templates %v, want that its machine booted, the log says so, and it is removed", templates(t, d))
	}
}

// memTotal returns the memory of a container's machine in MiB, without what its kernel has set aside.
func memTotal(t *testing.T, c *harness.Container) (mib int64) {
	t.Helper()
	if _, err := fmt.Sscan(c.Must("awk", "/MemTotal/{print int($2/1024)}", "/proc/meminfo"), &mib); err != nil {
		t.Fatal(err)
	}
	return mib
}

// clock returns the time in a container.
func clock(t *testing.T, c *harness.Container) time.Time {
	t.Helper()
	var seconds int64
	if _, err := fmt.Sscan(c.Must("date", "+%s"), &seconds); err != nil {
		t.Fatal(err)
	}
	return time.Unix(seconds, 0)
}
