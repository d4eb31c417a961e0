package e2e

import (
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

// TestVMOCIPod: two containers of an ordinary image run in one machine. They share the pod's network, have logs, volumes,
// exec and exit codes as containers on the node have, and outlive the daemon.
func TestVMOCIPod(t *testing.T) {
	d := harness.StartDaemon(t, harness.VMOCI(t))
	volume := filepath.Join(t.TempDir(), "volume")
	if err := os.MkdirAll(volume, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(volume, "greeting"), []byte("hello\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	p := d.RunPodWith(t, harness.PodConfig(t, "oci", func(c *runtimeapi.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = true }),
		harness.OCIHandler)
	data := func(c *runtimeapi.ContainerConfig) {
		c.Mounts = []*runtimeapi.Mount{{ContainerPath: "/data", HostPath: volume}}
	}
	one := p.Run(harness.ContainerConfig("one", harness.Busybox, data,
		harness.Shell("cat /data/greeting; mkfifo /data/fifo; echo written >/data/answer; uname -r; cat /data/fifo; exec httpd -f -p 8080 -h /data")))
	two := p.Run(harness.ContainerConfig("two", harness.Busybox, data,
		harness.Shell("until [ -p /data/fifo ]; do sleep 1; done; echo by FIFO >/data/fifo; trap 'echo bye; exit 7' TERM; while :; do wget -qO- http://127.0.0.1:8080/answer && break; sleep 1; done; sleep 3600 & wait")))
	two.WaitLog("written")
	if lines := strings.Split(harness.Text(one.Logs(), "stdout"), "\n"); len(lines) < 3 || lines[0] != "hello" ||
		!strings.Contains(lines[1], "cloud") || lines[2] != "by FIFO" {
		t.Errorf("log of the first container: got %q, want hello, the guest's kernel, and what the second container sent", lines)
	}
	if answer, err := os.ReadFile(filepath.Join(volume, "answer")); err != nil || string(answer) != "written\n" {
		t.Errorf("file in the volume: got %q, error %v", answer, err)
	}
	if out := one.Must("sh", "-c", "echo $((6*7)); hostname; id -u"); out != "42\noci\n0\n" {
		t.Errorf("output of a program: got %q", out)
	}
	if _, _, code := one.ExecSync("sh", "-c", "exit 9"); code != 9 {
		t.Errorf("exit code of a program: got %d, want 9", code)
	}
	if page := get(t, "http://"+p.Forward(t, 8080)+"/greeting"); page != "hello\n" {
		t.Errorf("page at the forwarded port: got %q, want hello", page)
	}
	hostile := p.Create(harness.ContainerConfig("hostile", harness.Busybox,
		harness.Shell("mkdir /m && mount -t virtiofs share0 /m && ls /m | wc -l && ln -s /etc /m/link; touch /m/file; echo end"),
		func(c *runtimeapi.ContainerConfig) { c.Linux.SecurityContext.Privileged = true }))
	hostile.Start()
	if text := hostile.WaitLog("end"); !strings.HasPrefix(text, "1\n") {
		t.Errorf("volumes below the pod's share: got %q, want one", text)
	}
	if errs := harness.Text(hostile.Logs(), "stderr"); strings.Count(errs, "Read-only file system") != 2 {
		t.Errorf("writes of a privileged container to the pod's share: got %q, want that both fail", errs)
	}
	clockwork := p.Run(harness.ContainerConfig("clockwork", harness.Busybox, harness.Shell("date -s @1000000000; echo set; sleep 3600"),
		func(c *runtimeapi.ContainerConfig) { c.Linux.SecurityContext.Privileged = true }))
	clockwork.WaitLog("set")
	d.Kill()
	d.Start()
	if out := two.Must("echo", "again"); out != "again\n" {
		t.Errorf("output after a restart of the daemon: got %q", out)
	}
	harness.Eventually(t, harness.GuestTimeout, func() error { // a daemon that begins to watch a guest looks at its clock at once
		if off := time.Since(clock(t, two)); off.Abs() > time.Minute {
			return fmt.Errorf("the guest's clock is behind the node's by %s", off)
		}
		return nil
	})
	two.Stop(10 * time.Second)
	if s := two.WaitExit(7); s.Reason != "Error" {
		t.Errorf("status of the stopped container: got %v", s)
	}
	if text := harness.Text(two.Logs(), "stdout"); text != "written\nbye\n" {
		t.Errorf("log of the stopped container: got %q, want written and bye", text)
	}
}

// TestVMOCIFaults: a guest whose kernel panics or reboots, a machine that is killed while the daemon is away, and a guest that answers
// never. The containers end with the reason, the pods are not ready, and all can be removed.
func TestVMOCIFaults(t *testing.T) {
	d := harness.StartDaemon(t, harness.VMOCI(t))
	privileged := func(c *runtimeapi.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = true }
	pods := map[string]*harness.Pod{}
	for _, name := range []string{"panics", "reboots", "killed", "hung"} {
		pods[name] = d.RunPodWith(t, harness.PodConfig(t, name, privileged), harness.OCIHandler)
	}
	notReady := func(p *harness.Pod) {
		t.Helper()
		harness.Eventually(t, 30*time.Second, func() error {
			if s := p.Status().State; s != runtimeapi.PodSandboxState_SANDBOX_NOTREADY {
				return fmt.Errorf("state of pod %s: got %s, want not ready", p.Config.Metadata.Name, s)
			}
			return nil
		})
	}
	for name, fault := range map[string]struct{ key, reason string }{"panics": {"c", "GuestPanic"}, "reboots": {"b", "Error"}} {
		c := pods[name].Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell("echo "+fault.key+" >/proc/sysrq-trigger; sleep 3600"),
			func(c *runtimeapi.ContainerConfig) { c.Linux.SecurityContext.Privileged = true }))
		if s := c.WaitState(runtimeapi.ContainerState_CONTAINER_EXITED); s.Reason != fault.reason || s.ExitCode != 137 {
			t.Errorf("status of the container of a guest that %s: got %v, want %s and 137", name, s, fault.reason)
		}
		notReady(pods[name])
	}

	killed := pods["killed"].Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
	hung := pods["hung"].Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
	kill := func(p *harness.Pod, signal syscall.Signal) {
		t.Helper()
		if err := syscall.Kill(p.MachinePid(), signal); err != nil {
			t.Fatal(err)
		}
	}
	kill(pods["killed"], syscall.SIGKILL)
	if s := killed.WaitState(runtimeapi.ContainerState_CONTAINER_EXITED); s.Reason != "Error" || s.ExitCode != 137 {
		t.Errorf("status of the container of a killed machine: got %v, want Error and 137", s)
	}
	notReady(pods["killed"])

	kill(pods["hung"], syscall.SIGSTOP)
	d.Kill()
	d.Start() // which waits for no guest
	begin := time.Now()
	if _, err := d.CRI().ListContainerStats(t.Context(), &runtimeapi.ListContainerStatsRequest{}); err != nil ||
		time.Since(begin) > 10*time.Second {
		t.Errorf("ListContainerStats: got error %v after %v, want success within 10s", err, time.Since(begin))
	}
	harness.Eventually(t, harness.GuestTimeout, func() error { // kills the machine in the end
		_, err := d.CRI().StopContainer(t.Context(), &runtimeapi.StopContainerRequest{ContainerId: hung.ID, Timeout: 1})
		return err
	})
	if s := hung.WaitState(runtimeapi.ContainerState_CONTAINER_EXITED); s.ExitCode != 137 {
		t.Errorf("status of the container of a guest that does not answer: got %v, want 137", s)
	}
	for _, p := range pods {
		p.Remove()
	}
}
