package attack

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

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// podPids is the kubelet's podPidsLimit in these tests. podMemory is the memory limit of a container in bytes.
const (
	podPids   = 100
	podMemory = 64 << 20
)

// attacker runs a container with limits for an untrusted user: half a CPU, podMemory and podPids.
func (g *ground) attacker(t *testing.T, opts ...harness.ContainerOption) *harness.Container {
	t.Helper()
	parent := g.d.CgroupParent + "/attackers"
	g.limitPids(t, parent)
	pod := g.d.RunPod(t, harness.PodConfig(t, "attacker", func(c *runtimeapi.PodSandboxConfig) { c.Linux.CgroupParent = parent }))
	t.Cleanup(pod.Remove)
	limits := func(c *runtimeapi.ContainerConfig) {
		c.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: podMemory, CpuQuota: 50_000, CpuPeriod: 100_000}
	}
	return pod.Run(harness.ContainerConfig("c", harness.Busybox, append([]harness.ContainerOption{harness.Sleep(), limits}, opts...)...))
}

// limitPids creates the cgroup of a pod with the limit podPids, as a kubelet with podPidsLimit does.
func (g *ground) limitPids(t *testing.T, cgroup string) {
	t.Helper()
	dir := filepath.Join("/sys/fs/cgroup/pids", cgroup)
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		dir = filepath.Join("/sys/fs/cgroup", cgroup)
	}
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "pids.max"), fmt.Append(nil, podPids), 0o644)); err != nil {
		t.Fatal(err)
	}
}

// refused runs scripts in a container and fails the test if one succeeds.
func refused(t *testing.T, c *harness.Container, scripts ...string) {
	t.Helper()
	for _, script := range scripts {
		if stdout, stderr, code := c.ExecSync("sh", "-c", script); code == 0 {
			t.Errorf("%q succeeded, want a failure; output %s%s", script, stdout, stderr)
		}
	}
}

func used(t *testing.T, path string) uint64 {
	t.Helper()
	var fs syscall.Statfs_t
	if err := syscall.Statfs(path, &fs); err != nil {
		t.Fatal(err)
	}
	return (fs.Blocks - fs.Bfree) * uint64(fs.Bsize)
}

func TestContainer(t *testing.T) {
	g := open(t)
	// Files and functions of the kernel, and files of the node.
	g.attack("kernel", func(t *testing.T) {
		c := g.attacker(t)
		refused(t, c,
			"mount -t tmpfs none /mnt", "mount -o remount,rw /proc/sys", "mount --bind / /mnt", "umount /proc", "umount /etc/hosts",
			"mknod /tmp/disk b 254 0 && head -c 1 /tmp/disk", "head -c 1 /dev/mem",
			"echo 1 >/proc/sys/kernel/panic", "echo '|/bin/sh' >/proc/sys/kernel/core_pattern", "echo h >/proc/sysrq-trigger",
			"cat /proc/kcore | head -c 1 | grep -q .", "cat /proc/timer_list | grep -q .", "cat /proc/keys | grep -q .",
			"echo 0 >/sys/kernel/mm/transparent_hugepage/enabled", "echo 1 >/sys/fs/cgroup/memory/memory.limit_in_bytes",
			"hostname taken", "insmod /etc/passwd", "swapoff -a && swapon /etc/passwd",
			"ip link add name taken type dummy", "iptables -L", "unshare -m true", "unshare -r mount -t tmpfs none /mnt",
			"nsenter -t 1 -m ls /var/lib/kubelet",
			"ls /proc/1/root/"+g.d.Root, "renice -n -20 -p 1", "echo -1000 >/proc/1/oom_score_adj", "chroot /proc/1/cwd/../../../.. ls "+g.d.Root)
	})
	g.attack("descriptors", func(t *testing.T) {
		before, err := os.Stat("/dev/null")
		if err != nil {
			t.Fatal(err)
		}
		user := func(s *runtimeapi.LinuxContainerSecurityContext) { s.RunAsUser = &runtimeapi.Int64Value{Value: 4321} }
		for _, c := range []*harness.Container{g.attacker(t), g.attacker(t, harness.Security(user))} {
			c.ExecSync("sh", "-c", "chmod 667 /proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2; chown 4321 /proc/self/fd/0")
			c.Exec(harness.SPDY, nil, false, "sh", "-c", "chmod 667 /proc/self/fd/0; chown 4321 /proc/self/fd/0")
		}
		after, err := os.Stat("/dev/null")
		if err != nil {
			t.Fatal(err)
		}
		if b, a := before.Sys().(*syscall.Stat_t), after.Sys().(*syscall.Stat_t); before.Mode() != after.Mode() || b.Uid != a.Uid ||
			b.Gid != a.Gid {
			t.Errorf("the host's /dev/null: got mode %v, owner %d; want mode %v, owner %d", after.Mode(), a.Uid, before.Mode(), b.Uid)
		}
	})
	g.attack("fork bomb", func(t *testing.T) {
		c := g.attacker(t, harness.Command("sleep", "3600"))
		// A shell exits when it cannot fork, and leaves its children running.
		refused(t, c, "while :; do sleep 3600 >/dev/null 2>&1 & done", "true | true")
		c.Must("true") // the kubelet's execs still work: the limit does not apply to processes that are moved into the cgroup
	})
	g.attack("memory", func(t *testing.T) {
		if s := g.attacker(t, harness.Command("tail", "/dev/zero")).WaitExit(137); s.Reason != "OOMKilled" {
			t.Errorf("reason of the exit: got %s (%s), want OOMKilled", s.Reason, s.Message)
		}
	})
	// All files that the node provides and that the container can write.
	g.attack("files of the node", func(t *testing.T) {
		before := used(t, "/run")
		c := g.attacker(t, func(c *runtimeapi.ContainerConfig) { c.Linux.Resources.MemoryLimitInBytes = 0 })
		for _, file := range []string{"/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/dev/shm/file", "/dev/file"} {
			c.ExecSync("dd", "if=/dev/zero", "of="+file, "bs=1M", "count=300")
		}
		if now := used(t, "/run"); now > before+100<<20 {
			t.Errorf("size of the node's /run: got %d MiB, was %d MiB", now>>20, before>>20)
		}
	})
	g.attack("log", func(t *testing.T) {
		c := g.attacker(t, harness.Shell("yes $(head -c 2000 /dev/zero | tr '\\0' x) & yes >&2"))
		c.WaitLog("xxx")
		if err := g.d.Runtime().ReopenContainerLog(t.Context(), c.ID); err != nil {
			t.Error(err)
		}
		c.Stop(0)
	})
	g.attack("exec", func(t *testing.T) {
		c := g.attacker(t)
		// The output exceeds the limit of an answer, and a child keeps the streams open.
		ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
		defer cancel()
		resp, err := g.d.CRI().ExecSync(ctx,
			&runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"sh", "-c", "yes | head -c 40000000; sleep 3600 &"}, Timeout: 20})
		if err == nil && len(resp.Stdout) > 16<<20 {
			t.Errorf("output of the exec: got %d bytes, want at most %d", len(resp.Stdout), 16<<20)
		}
		if _, err := g.d.CRI().ExecSync(ctx,
			&runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"sh", "-c", "trap '' TERM INT HUP; while :; do :; done"},
				Timeout: 1}); err == nil {
			t.Error("ExecSync of an endless command succeeded, want a timeout")
		}
	})
	g.attack("its neighbours' processes", func(t *testing.T) {
		c := g.attacker(t, harness.Shell("trap '' TERM; while :; do kill -9 -1; kill -9 $(seq 2 400); done 2>/dev/null"))
		for range 5 {
			resp, err := g.d.CRI().ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: []string{"sleep", "1"}, Timeout: 10})
			if code := status.Code(err); code != codes.Unavailable && resp.GetExitCode() != 137 {
				t.Errorf("ExecSync that was killed: got %v, error %v; want Unavailable or exit code 137", resp, err)
			}
		}
		c.Stop(time.Second)
	})
	// Pods cannot reach the ports on which the node listens. The tests' registry, which other nodes of a cluster use, is
	// not part of it.
	g.attack("doors of the node", func(t *testing.T) {
		c := g.attacker(t)
		gateway := strings.TrimSpace(c.Must("sh", "-c", "ip route | awk '/default/ {print $3}'"))
		for _, port := range listening(t) {
			if strings.HasSuffix(harness.Registry(t).Addr, fmt.Sprint(":", port)) {
				continue
			}
			refused(t, c, fmt.Sprintf("nc -w 1 %s %d </dev/null", gateway, port), fmt.Sprintf("nc -w 1 127.0.0.1 %d </dev/null", port))
		}
	})
}
