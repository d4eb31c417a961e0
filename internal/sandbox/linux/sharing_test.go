package linux

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
)

func TestSharedNamespaces(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod(func(c *runtimeapi.PodSandboxConfig) {
			c.Linux.Sysctls = map[string]string{"kernel.shm_rmid_forced": "1", "net.ipv4.ip_unprivileged_port_start": "80"}
			c.DnsConfig = &runtimeapi.DNSConfig{Servers: []string{"10.0.0.10"}, Searches: []string{"a.example", "b.example"},
				Options: []string{"ndots:5"}}
		})
		one, two := p.container(forever).start(), p.container(forever).start()
		for _, ns := range []string{"ipc", "uts", "net"} {
			if a, b := namespaceOf(t, one, ns), namespaceOf(t, two, ns); a != b {
				t.Errorf("%s namespaces: got %s and %s, want the same", ns, a, b)
			}
		}
		for _, ns := range []string{"pid", "mnt"} {
			if a, b := namespaceOf(t, one, ns), namespaceOf(t, two, ns); a == b {
				t.Errorf("%s namespaces: both containers have %s, want two", ns, a)
			}
		}
		if got := one.exec("hostname"); got != p.Config.Hostname {
			t.Errorf("host name: got %q, want %q", got, p.Config.Hostname)
		}
		if got := one.exec("cat /proc/sys/kernel/shm_rmid_forced /proc/sys/net/ipv4/ip_unprivileged_port_start | tr '\n' ' '"); got != "1 80" {
			t.Errorf("sysctls: got %q, want 1 80", got)
		}
		if got, want := one.exec("cat /etc/resolv.conf"), "search a.example b.example\nnameserver 10.0.0.10\noptions ndots:5"; got != want {
			t.Errorf("/etc/resolv.conf: got %q, want %q", got, want)
		}
		one.exec("echo shared > /dev/shm/x")
		if got := two.exec("cat /dev/shm/x"); got != "shared" {
			t.Errorf("/dev/shm/x in the second container: got %q, want %q", got, "shared")
		}
	})
}

// ping sends an echo request to loopback in a network namespace as a user without capabilities, and waits for the
// answer. It uses the socket type that ping(8) uses for such users, which busybox lacks.
func ping(netns string, uid int) error {
	return mnt.OnNewThread(func() error {
		at, err := unix.Open(netns, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(at)
		if err := unix.Setns(at, unix.CLONE_NEWNET); err != nil {
			return err
		}
		// Changes only this thread's user; syscall.Setresuid changes all threads'.
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
			return errno
		}
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
			return errno
		}
		s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP)
		if err != nil {
			return err
		}
		defer unix.Close(s)
		echo := []byte{8, 0, 0, 0, 0, 0, 0, 1}
		if err := unix.Sendto(s, echo, 0, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
			return err
		}
		if err := unix.SetsockoptTimeval(s, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}); err != nil {
			return err
		}
		_, _, err = unix.Recvfrom(s, make([]byte, 64), 0)
		return err
	})
}

// TestOwnNetworkNeedsNoRoot: an unprivileged program can serve port 80 and ping, unless the pod's sysctls forbid it.
func TestOwnNetworkNeedsNoRoot(t *testing.T) {
	const settings = "cat /proc/sys/net/ipv4/ip_unprivileged_port_start /proc/sys/net/ipv4/ping_group_range | tr '\n\t' '  '"
	bothRuntimes(t, func(t *testing.T, r *rig) {
		user := func(c *runtimeapi.ContainerConfig) {
			c.Linux.SecurityContext.RunAsUser = &runtimeapi.Int64Value{Value: 4321}
		}
		p := r.pod()
		if out, err := exec.Command("nsenter", "--net="+p.Netns, "ip", "link", "set", "lo", "up").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		c := p.container(forever, user).start()
		if err := ping(p.Netns, 4321); err != nil {
			t.Errorf("ping: %v", err)
		}
		const serve = "/bin/busybox nc -l -p 80 >/dev/null 2>&1 & for i in 0 1 2 3 4 5 6 7 8 9; do cat /proc/net/tcp /proc/net/tcp6 | grep -q ':0050 ' && break; sleep 0.5; done; "
		if got := c.exec(serve + "cat /proc/net/tcp /proc/net/tcp6 | grep -c ':0050 '; kill $!"); got != "1" {
			t.Errorf("programs that listen on port 80: got %s, want 1", got)
		}
		if got := c.exec(settings); got != "0 0 2147483647" {
			t.Errorf("sysctls: got %q, want 0 0 2147483647", got)
		}
		other := r.pod(func(c *runtimeapi.PodSandboxConfig) {
			c.Linux.Sysctls = map[string]string{"net/ipv4/ip_unprivileged_port_start": "1024", "net.ipv4.ping_group_range": "1 0"}
		})
		if got := other.container(forever, user).start().exec(settings); got != "1024 1 0" {
			t.Errorf("sysctls that the pod requests: got %q, want 1024 1 0", got)
		}
		raw, err := os.ReadFile("/proc/sys/net/ipv4/ip_unprivileged_port_start")
		if err != nil {
			t.Fatal(err)
		}
		host := r.pod(func(c *runtimeapi.PodSandboxConfig) {
			c.Linux.SecurityContext.NamespaceOptions.Network = runtimeapi.NamespaceMode_NODE
		})
		if got := host.container(forever).start().exec("cat /proc/sys/net/ipv4/ip_unprivileged_port_start"); got != strings.TrimSpace(string(raw)) || got == "0" {
			t.Errorf("the node's ip_unprivileged_port_start: got %q, want %q and not 0", got, raw)
		}
	})
}

func namespaceOf(t *testing.T, c *testContainer, kind string) string {
	t.Helper()
	name, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(c.status().Pid), "ns", kind))
	if err != nil {
		t.Fatal(err)
	}
	return name
}

func TestSharedPIDNamespace(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod(func(c *runtimeapi.PodSandboxConfig) {
			c.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_POD
		})
		one, two := p.container("setsid sleep 4321 & "+forever).start(), p.container(forever).start()
		one.waitLog("up")
		if a, b := namespaceOf(t, one, "pid"), namespaceOf(t, two, "pid"); a != b {
			t.Errorf("pid namespaces: got %s and %s, want the same", a, b)
		}
		if got := two.exec("ps"); !strings.Contains(got, "sleep 4321") || !strings.Contains(got, "/pause") {
			t.Errorf("ps in the second container: got %s, want the first container's sleep and /pause", got)
		}
		// Processes that a container leaves in the shared namespace end with it.
		one.stop(10 * time.Second)
		if got := two.exec("ps"); strings.Contains(got, "sleep 4321") {
			t.Errorf("ps after the first container's end: got %s, want no sleep 4321", got)
		}
		// The pod is unusable without its init.
		state, err := readPodState(r.cfg.podRunDir(p.ID))
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(state.Pause.Pid, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if e := r.waitEvent(p.ID, ""); e.Status.State != sandbox.StateExited {
			t.Errorf("event of the sandbox: got %+v, want exited", e)
		}
		if s := two.waitExit(); s.ExitCode != 137 {
			t.Errorf("status of the second container: got %+v, want exit code 137", s)
		}
	})
}

func TestTargetPIDNamespace(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		target := p.container("sleep 9876")
		debug := p.container("ps; "+forever, func(c *runtimeapi.ContainerConfig) {
			c.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_TARGET
			c.Linux.SecurityContext.NamespaceOptions.TargetId = target.ID
		})
		if err := r.StartContainer(t.Context(), p.Pod, debug.Container); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("StartContainer before its target: got error %v, want ErrFailedPrecondition", err)
		}
		target.start()
		debug.start().waitLog("sleep 9876")
		debug.stop(0)
		if s := target.status(); s.State != sandbox.StateRunning {
			t.Errorf("status of the target: got %+v, want running", s)
		}
	})
}

// TestOwnIPC: containers with their own IPC namespaces share none and lack the pod's kernel parameters.
func TestOwnIPC(t *testing.T) {
	r := newRig(t, "crun")
	own := func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.SecurityContext.NamespaceOptions.Ipc = runtimeapi.NamespaceMode_CONTAINER
	}
	p := r.pod(own)
	one, two := p.container(forever).start(), p.container(forever).start()
	host, err := os.Readlink("/proc/self/ns/ipc")
	if err != nil {
		t.Fatal(err)
	}
	if a, b := namespaceOf(t, one, "ipc"), namespaceOf(t, two, "ipc"); a == b || a == host || b == host {
		t.Errorf("ipc namespaces: got %s, %s and %s (the host's), want three", a, b, host)
	}
	p.Config.Linux.Sysctls = map[string]string{"kernel.shm_rmid_forced": "1"}
	if err := r.Validate(p.Pod, nil); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Validate with an IPC sysctl: got error %v, want ErrInvalidArgument", err)
	}
	p.Config.Linux.Sysctls = nil
}

func TestHostNetwork(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod(func(c *runtimeapi.PodSandboxConfig) {
			c.Linux.SecurityContext.NamespaceOptions.Network = runtimeapi.NamespaceMode_NODE
			c.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_NODE
			c.Linux.SecurityContext.NamespaceOptions.Ipc = runtimeapi.NamespaceMode_NODE
		})
		c := p.container("sleep 5555 & " + forever).start()
		c.waitLog("up")
		for _, ns := range []string{"net", "pid", "ipc", "uts"} {
			host, err := os.Readlink("/proc/self/ns/" + ns)
			if err != nil {
				t.Fatal(err)
			}
			if got := namespaceOf(t, c, ns); got != host {
				t.Errorf("%s namespace: got %s, want the host's %s", ns, got, host)
			}
		}
		s, _ := c.handle(t).Snapshot()
		c.stop(0)
		for _, dir := range r.cgroups.Dirs(s.Cgroup) {
			if pids := cgroup.Procs(dir); len(pids) > 0 {
				t.Errorf("processes in %s after the stop: got %v, want none", dir, pids)
			}
		}
	})
}
