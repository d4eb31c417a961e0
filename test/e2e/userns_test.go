package e2e

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// usersOf requests a user namespace whose users and groups begin at an ID of the node.
func usersOf(first uint32) *runtimeapi.UserNamespace {
	r := []*runtimeapi.IDMapping{{HostId: first, Length: 65536}}
	return &runtimeapi.UserNamespace{Uids: r, Gids: r}
}

func inUsers(u *runtimeapi.UserNamespace) harness.PodOption {
	return harness.Namespaces(func(n *namespaces) { n.UsernsOptions = u })
}

// bind mounts a host path, mapped as a kubelet asks for it.
func mappedBind(u *runtimeapi.UserNamespace, host, path string, change ...func(*runtimeapi.Mount)) harness.ContainerOption {
	return func(c *runtimeapi.ContainerConfig) {
		m := &runtimeapi.Mount{HostPath: host, ContainerPath: path, UidMappings: u.Uids, GidMappings: u.Gids}
		for _, f := range change {
			f(m)
		}
		c.Mounts = append(c.Mounts, m)
	}
}

// TestUserNamespaces has a subtest for each line of the conformance suite, and for what else a kubelet relies on.
func TestUserNamespaces(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"), harness.VM(t))
	d.Pull(t, harness.Busybox)
	uidMap := func(t *testing.T, u *runtimeapi.UserNamespace) []string {
		return strings.Fields(printed(t, d, harness.PodConfig(t, "p", inUsers(u)), harness.Busybox, "cat /proc/self/uid_map", nil))
	}
	for name, c := range map[string]struct {
		users *runtimeapi.UserNamespace
		want  string
	}{
		"runtime should support NamespaceMode_POD":  {usersOf(65536), "[0 65536 65536]"},
		"runtime should support NamespaceMode_NODE": {&runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_NODE}, "[0 0 4294967295]"},
		"a range of the node":                       {&runtimeapi.UserNamespace{}, "[0 1879048192 65536]"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := fmt.Sprint(uidMap(t, c.users)); got != c.want {
				t.Errorf("uid_map = %s, want %s", got, c.want)
			}
		})
	}
	two, unmapped := usersOf(65536), usersOf(65536)
	two.Uids = append(two.Uids, usersOf(1<<20).Uids...)
	two.Gids = two.Uids
	unmapped.Uids[0].ContainerId = 1
	for name, users := range map[string]*runtimeapi.UserNamespace{
		"runtime should fail if more than one mapping provided": two,
		"runtime should fail if container ID 0 is not mapped":   unmapped,
		"runtime should fail with NamespaceMode_CONTAINER": {Mode: runtimeapi.NamespaceMode_CONTAINER, Uids: usersOf(65536).Uids,
			Gids: usersOf(65536).Gids},
		"runtime should fail with NamespaceMode_TARGET": {Mode: runtimeapi.NamespaceMode_TARGET, Uids: usersOf(65536).Uids,
			Gids: usersOf(65536).Gids},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := d.CRI().RunPodSandbox(context.Background(),
				&runtimeapi.RunPodSandboxRequest{Config: harness.PodConfig(t, "p", inUsers(users))})
			if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "userns_options") {
				t.Errorf("error = %v, want InvalidArgument that names the field", err)
			}
		})
	}
	t.Run("IDs of another pod", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "p", inUsers(usersOf(1<<20))))
		defer p.Remove()
		_, err := d.CRI().RunPodSandbox(context.Background(),
			&runtimeapi.RunPodSandboxRequest{Config: harness.PodConfig(t, "q", inUsers(usersOf(1<<20+1)))})
		if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), p.ID) {
			t.Errorf("error = %v, want FailedPrecondition that names the pod", err)
		}
	})
	t.Run("features", func(t *testing.T) {
		resp, err := d.CRI().Status(context.Background(), &runtimeapi.StatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range resp.RuntimeHandlers {
			if !h.GetFeatures().GetUserNamespaces() {
				t.Errorf("handler %q has no user namespaces", h.Name)
			}
		}
		if !resp.GetFeatures().GetUserNamespacesHostNetwork() {
			t.Error("no user namespaces on the host network")
		}
	})
	t.Run("volumes", func(t *testing.T) { testUserVolumes(t, d) })
	t.Run("host network", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "p", harness.HostNetwork(), inUsers(usersOf(1<<20))))
		defer p.Remove()
		c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep()))
		if got := strings.TrimSpace(c.Must("readlink", "/proc/self/ns/net")); got != link(t, "net") {
			t.Errorf("network namespace %s, want the node's", got)
		}
		c.Must("sh", "-c", "ls -d /sys/class/net/lo && id -u | grep -x 0")
		if _, _, code := c.ExecSync("sh", "-c", "echo 1 > /sys/kernel/profiling"); code == 0 {
			t.Error("/sys is writable")
		}
	})
	t.Run("all calls", func(t *testing.T) { testUserNamespaceCalls(t, d) })
	t.Run("terminals and resizes", func(t *testing.T) { testUserNamespaceTerminal(t, d) })
	t.Run("tripod run --userns, with every handler", func(t *testing.T) { testRunInUserNamespace(t, d) })
	t.Run("nothing else is open", func(t *testing.T) { checkOpenDirectories(t, d.State) })
}

// testUserVolumes: files of the node's root belong to the pod's root in volumes of every kind, and what the pod's root
// writes belongs to the node's root. Without mappings, they belong to nobody.
func testUserVolumes(t *testing.T, d *harness.Daemon) {
	d.Pull(t, harness.Layers)
	u := usersOf(1 << 20)
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, name := range []string{"rw", "ro", "tmpfs", "later"} {
		if err := os.Mkdir(at(name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, err := range []error{
		unix.Mount("tmpfs", at("tmpfs"), "tmpfs", 0, "mode=700"),
		unix.Mount(at("later"), at("later"), "", unix.MS_BIND, ""), unix.Mount("", at("later"), "", unix.MS_SHARED, ""),
		os.WriteFile(at("ro/secret"), []byte("s3cret"), 0o400), os.WriteFile(at("file"), []byte("log"), 0o600),
		os.WriteFile(at("rw/user"), nil, 0o600), os.Chown(at("rw/user"), 1000, 2000),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	defer func() {
		_ = errors.Join(unix.Unmount(at("tmpfs"), unix.MNT_DETACH), unix.Unmount(at("later"), unix.MNT_DETACH))
	}()
	p := d.RunPod(t, harness.PodConfig(t, "p", inUsers(u)))
	defer p.Remove()
	if !mapsTmpfs(t) {
		why := refused(t, d, p, harness.ContainerConfig("tmpfs", harness.Busybox, harness.Sleep(), mappedBind(u, at("tmpfs"), "/tmpfs")))
		if !strings.Contains(why, "tmpfs, which needs Linux 6.3") {
			t.Errorf("a volume on a tmpfs, before Linux 6.3: %s", why)
		}
		if err := unix.Unmount(at("tmpfs"), 0); err != nil {
			t.Fatal(err)
		}
	}
	c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep(),
		mappedBind(u, at("rw"), "/rw"), mappedBind(u, at("ro"), "/ro", func(m *runtimeapi.Mount) { m.Readonly = true }),
		mappedBind(u, at("file"), "/dev/termination-log"), mappedBind(u, at("tmpfs"), "/tmpfs"),
		mappedBind(u, at("later"), "/later", func(m *runtimeapi.Mount) {
			m.Propagation = runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER
		}),
		mappedBind(u, at("ro"), "/rro", func(m *runtimeapi.Mount) { m.Readonly, m.RecursiveReadOnly = true, true }),
		func(c *runtimeapi.ContainerConfig) {
			c.Mounts = append(c.Mounts, &runtimeapi.Mount{HostPath: at("rw"), ContainerPath: "/unmapped"})
			for path, sub := range map[string]string{"/image": "", "/layers": "layers"} {
				c.Mounts = append(c.Mounts, &runtimeapi.Mount{
					ContainerPath: path, Image: &runtimeapi.ImageSpec{Image: harness.Layers}, ImageSubPath: sub, Readonly: true,
					UidMappings: u.Uids, GidMappings: u.Gids,
				})
			}
			c.Devices = []*runtimeapi.Device{{HostPath: "/dev/zero", ContainerPath: "/dev/mine", Permissions: "r"}}
		}))
	for script, want := range map[string]string{
		"stat -c %u /rw /ro /dev/termination-log /tmpfs /later /rro /image /layers /image/bin/busybox": "0 0 0 0 0 0 0 0 0",
		"stat -c %u:%g /rw/user":     "1000:2000",
		"cat /ro/secret /rro/secret": "s3crets3cret",
		"touch /ro/x || touch /rro/x || touch /image/x || echo read-only":                      "read-only",
		"echo bye > /dev/termination-log; cat /dev/termination-log":                            "bye",
		"touch /rw/new /tmpfs/new && chown 5:6 /tmpfs/new && stat -c %u:%g /rw/new /tmpfs/new": "0:0 5:6",
		"stat -c %u /unmapped; touch /unmapped/x || echo denied":                               "65534 denied",
		"head -c 2 /dev/mine | wc -c":                                                          "2",
		"touch /etc/new && stat -c %u /etc /etc/new":                                           "0 0",
		"id -u; echo done > /dev/shm/x; stat -c %u /dev/shm/x":                                 "0 0",
	} {
		out, errs, code := c.ExecSync("sh", "-c", script)
		if got := strings.Join(strings.Fields(out), " "); got != want {
			t.Errorf("%s: %q (code %d, %s), want %q", script, got, code, errs, want)
		}
	}
	for name, want := range map[string][2]uint32{"rw/new": {0, 0}, "tmpfs/new": {5, 6}} {
		var st unix.Stat_t
		if err := unix.Stat(at(name), &st); err != nil || [2]uint32{st.Uid, st.Gid} != want {
			t.Errorf("%s belongs to %d:%d on the node, %v; want %v", name, st.Uid, st.Gid, err, want)
		}
	}
	if err := errors.Join(os.Mkdir(at("later/sub"), 0o755), unix.Mount("tmpfs", at("later/sub"), "tmpfs", 0, "")); err != nil {
		t.Fatal(err)
	}
	if out := c.Must("cat", "/proc/mounts"); !strings.Contains(out, " /later/sub ") {
		t.Errorf("a mount made later on the node did not reach the container:\n%s", out)
	}
}

// mapsTmpfs returns whether this kernel, by its version, can map the owners of a tmpfs.
func mapsTmpfs(t *testing.T) bool {
	t.Helper()
	var name unix.Utsname
	var major, minor int
	if err := unix.Uname(&name); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor); err != nil {
		t.Fatal(err)
	}
	return major > 6 || major == 6 && minor >= 3
}

// testUserNamespaceCalls: what works without a user namespace works with one, also after the daemon was killed.
func testUserNamespaceCalls(t *testing.T, d *harness.Daemon) {
	u := usersOf(1 << 21)
	p := d.RunPod(t, harness.PodConfig(t, "p", inUsers(u), func(c *runtimeapi.PodSandboxConfig) {
		c.Hostname = "mapped"
		c.DnsConfig = &runtimeapi.DNSConfig{Servers: []string{"192.0.2.53"}}
		c.Linux.Sysctls = map[string]string{"net.ipv4.ping_group_range": "0 4242", "kernel.shm_rmid_forced": "1"}
	}))
	defer p.Remove()
	shared := harness.Security(func(s *security) { s.NamespaceOptions.UsernsOptions = u })
	c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Shell("echo page > /index.html; httpd -p 80 -h /; echo err >&2; "+
		"trap 'exit 7' TERM; sleep 3600 & wait"), shared))
	c.WaitLog("err")
	check := func() {
		t.Helper()
		for script, want := range map[string]string{
			"hostname; id -u":                         "mapped 0",
			"grep -c 192.0.2.53 /etc/resolv.conf":     "1",
			"cat /proc/sys/net/ipv4/ping_group_range": "0 4242",
			"cat /proc/sys/kernel/shm_rmid_forced":    "1",
			"cat /proc/self/oom_score_adj > /dev/null && echo 500 > /proc/self/oom_score_adj && echo ok": "ok",
		} {
			out, errs, code := c.ExecSync("sh", "-c", script)
			if got := strings.Join(strings.Fields(out), " "); got != want {
				t.Errorf("%s: %q (code %d, %s), want %q", script, got, code, errs, want)
			}
		}
		if r := c.Exec(harness.Protocols[0], nil, true, "tty"); r.Code != 0 || !strings.Contains(r.Stdout, "/dev/") {
			t.Errorf("exec with a terminal: %+v", r)
		}
		if got := get(t, "http://"+p.Forward(t, 80)); got != "page\n" {
			t.Errorf("a forwarded port: %q", got)
		}
		stats, err := d.Runtime().ContainerStats(context.Background(), c.ID)
		if err != nil || stats.GetCpu().GetUsageCoreNanoSeconds().GetValue() == 0 {
			t.Errorf("stats: %v, %v", stats, err)
		}
	}
	check()
	resp, err := d.CRI().PodSandboxStatus(context.Background(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: p.ID})
	if got := resp.GetStatus().GetLinux().GetNamespaces().GetOptions().GetUsernsOptions(); err != nil || len(got.GetUids()) != 1 ||
		got.Uids[0].HostId != 1<<21 {
		t.Errorf("the status has the user namespace %v, %v", got, err)
	}
	d.Kill()
	d.Start()
	check()
	second := p.Run(harness.ContainerConfig("second", harness.Busybox,
		harness.Shell("readlink /proc/self/ns/user /proc/self/ns/net; sleep 3600"), shared))
	if got, want := second.Must("readlink", "/proc/1/ns/user"), c.Must("readlink", "/proc/1/ns/user"); got != want {
		t.Errorf("the containers' user namespaces: %s and %s", got, want)
	}
	c.Stop(10 * time.Second)
	c.WaitExit(7)
	c.Remove()
	info, err := d.CRI().ContainerStatus(context.Background(), &runtimeapi.ContainerStatusRequest{ContainerId: second.ID, Verbose: true})
	if err != nil || !regexp.MustCompile(`"imageOwners":\s*"mapped"`).MatchString(info.GetInfo()["info"]) {
		t.Errorf("verbose status: %v, %v", info.GetInfo(), err)
	}
}

// testUserNamespaceTerminal: the pod's root owns its terminal, which follows the client's size, also after the daemon was
// killed; limits change in place.
func testUserNamespaceTerminal(t *testing.T, d *harness.Daemon) {
	u := usersOf(1 << 22)
	p := d.RunPod(t, harness.PodConfig(t, "p", inUsers(u)))
	defer p.Remove()
	c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Command("sh"),
		func(c *runtimeapi.ContainerConfig) { c.Stdin, c.Tty = true, true },
		harness.Security(func(s *security) { s.NamespaceOptions.UsernsOptions = u })))
	for _, protocol := range harness.Protocols {
		for what, url := range map[string]string{"attach": c.AttachURL(true, true), "exec": execURL(t, d, c, true, "sh")} {
			s := startSession(t, protocol, url, true)
			s.sizes <- &remotecommand.TerminalSize{Width: 77, Height: 33}
			s.send("until [ \"$(stty size)\" = '33 77' ]; do usleep 10000; done; echo owner-$(stat -c %u $(tty))-" + what + "\n")
			s.stdout.wait(t, "owner-0-"+what)
			s.end()
			<-s.done
		}
		d.Kill()
		d.Start()
	}
	limit := &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 48 << 20}}
	if err := d.Runtime().UpdateContainerResources(t.Context(), c.ID, limit); err != nil {
		t.Fatal(err)
	}
	if got := limitsOf(t, c).memory; got != 48<<20 {
		t.Errorf("memory limit after a resize: got %d, want %d", got, 48<<20)
	}
}

// testRunInUserNamespace: the command line asks for a user namespace, which means nothing for components and machines.
func testRunInUserNamespace(t *testing.T, d *harness.Daemon) {
	run := func(handler, image string, words ...string) (id string) {
		t.Helper()
		command := tripod(t, d, "run", "--userns", "--log-dir", t.TempDir(), "--name", "cli-"+handler, "-r", handler)
		command.Args = append(append(command.Args, image), words...)
		out, err := command.CombinedOutput()
		if err != nil {
			t.Fatalf("tripod run --userns -r %s: %v\n%s", handler, err, out)
		}
		id = lines(string(out))[len(lines(string(out)))-1]
		t.Cleanup(func() {
			if out, err := tripod(t, d, "rmp", "-f", "cli-"+handler).CombinedOutput(); err != nil {
				t.Errorf("tripod rmp: %v\n%s", err, out)
			}
		})
		return id
	}
	id := run("linux", harness.Busybox, "--command", "--", "sleep", "3600")
	out, err := d.CRI().ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: []string{"cat", "/proc/1/uid_map"}})
	if cells := strings.Fields(string(out.GetStdout())); err != nil || len(cells) != 3 || cells[0] != "0" || cells[1] == "0" ||
		cells[2] != "65536" {
		t.Errorf("uid_map: got %v, error %v; want 65536 users of a range of the node", out, err)
	}
	for handler, image := range map[string]string{"wasm": harness.GreeterC, "vm": harness.TinyGuest} {
		id := run(handler, image)
		resp, err := d.CRI().ContainerStatus(t.Context(), &runtimeapi.ContainerStatusRequest{ContainerId: id})
		if err != nil || resp.Status.State != running {
			t.Errorf("container of handler %s: got %v, error %v; want running", handler, resp.GetStatus(), err)
		}
	}
}

// checkOpenDirectories: of the daemon's run-time files, other users can reach only the directories on the way to pods'
// own directories, and cannot list these.
func checkOpenDirectories(t *testing.T, state string) {
	passed := map[string]bool{state: true, filepath.Join(state, "linux"): true, filepath.Join(state, "linux", "pods"): true}
	for dir := range passed {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			name := filepath.Join(dir, e.Name())
			info, err := os.Lstat(name)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if mode := info.Mode().Perm(); err != nil || mode&0o077 != 0 && (!passed[name] || mode != 0o711) && mode != 0o710 {
				t.Errorf("%s has mode %v, %v; others could reach it", name, info.Mode(), err)
			}
		}
	}
}
