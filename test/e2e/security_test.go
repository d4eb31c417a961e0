package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

type (
	namespaces = runtimeapi.NamespaceOption
	security   = runtimeapi.LinuxContainerSecurityContext
)

// printed runs a container until it exits and returns its output.
func printed(t *testing.T, d *harness.Daemon, pod *runtimeapi.PodSandboxConfig, image, script string, change func(*security)) string {
	t.Helper()
	p := d.RunPod(t, pod)
	defer p.Remove()
	c := p.Create(harness.ContainerConfig("c", image, harness.Shell(script), harness.Security(func(s *security) {
		n := pod.Linux.SecurityContext.NamespaceOptions
		s.NamespaceOptions = &namespaces{Pid: n.Pid, Ipc: n.Ipc, Network: n.Network}
		if change != nil {
			change(s)
		}
	})))
	c.Start()
	c.WaitState(runtimeapi.ContainerState_CONTAINER_EXITED)
	return strings.TrimSpace(harness.Text(c.Logs(), ""))
}

// refused checks that CreateContainer or StartContainer fails with a code that blames the request, and returns the
// message.
func refused(t *testing.T, d *harness.Daemon, p *harness.Pod, config *runtimeapi.ContainerConfig) string {
	t.Helper()
	ctx := context.Background()
	resp, err := d.CRI().CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: p.ID, Config: config, SandboxConfig: p.Config})
	if err == nil {
		_, err = d.CRI().StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: resp.ContainerId})
	}
	switch status.Code(err) {
	case codes.InvalidArgument, codes.Unimplemented, codes.FailedPrecondition, codes.NotFound:
	default:
		t.Errorf("got error %v, want a code that blames the request", err)
	}
	return status.Convert(err).Message()
}

func value(v int64) *runtimeapi.Int64Value { return &runtimeapi.Int64Value{Value: v} }

// link returns the name of a namespace of the test's own process.
func link(t *testing.T, kind string) string {
	t.Helper()
	name, err := os.Readlink("/proc/self/ns/" + kind)
	if err != nil {
		t.Fatal(err)
	}
	return name
}

func TestNamespaceOption(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	ns := func(t *testing.T, kind string, change func(*namespaces)) string {
		return printed(t, d, harness.PodConfig(t, "p", harness.Namespaces(change)), harness.Busybox, "readlink /proc/self/ns/"+kind, nil)
	}
	for name, c := range map[string]struct {
		kind string
		mode func(*namespaces)
		host bool
	}{
		"runtime should support HostPID":              {"pid", func(n *namespaces) { n.Pid = runtimeapi.NamespaceMode_NODE }, true},
		"runtime should support ContainerPID":         {"pid", func(n *namespaces) { n.Pid = runtimeapi.NamespaceMode_CONTAINER }, false},
		"runtime should support HostIpc is true":      {"ipc", func(n *namespaces) { n.Ipc = runtimeapi.NamespaceMode_NODE }, true},
		"runtime should support HostIpc is false":     {"ipc", func(n *namespaces) { n.Ipc = runtimeapi.NamespaceMode_POD }, false},
		"runtime should support HostNetwork is true":  {"net", func(n *namespaces) { n.Network = runtimeapi.NamespaceMode_NODE }, true},
		"runtime should support HostNetwork is false": {"net", func(n *namespaces) { n.Network = runtimeapi.NamespaceMode_POD }, false},
	} {
		t.Run(name, func(t *testing.T) {
			if got := ns(t, c.kind, c.mode); (got == link(t, c.kind)) != c.host || !strings.HasPrefix(got, c.kind) {
				t.Errorf("namespace of the container: got %s, want shared with the node's %s: %v", got, link(t, c.kind), c.host)
			}
		})
	}
	t.Run("runtime should support PodPID", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "p", harness.Namespaces(func(n *namespaces) { n.Pid = runtimeapi.NamespaceMode_POD })))
		defer p.Remove()
		shared := harness.Security(func(s *security) { s.NamespaceOptions.Pid = runtimeapi.NamespaceMode_POD })
		one := p.Run(harness.ContainerConfig("one", harness.Busybox, harness.Shell("sleep 4321 & wait"), shared))
		two := p.Run(harness.ContainerConfig("two", harness.Busybox, harness.Sleep(), shared))
		if out := two.Must("ps"); !strings.Contains(out, "sleep 4321") {
			t.Errorf("ps: want the other container's process in\n%s", out)
		}
		if out := two.Must("sh", "-c", "cat /proc/1/cmdline"); strings.Contains(out, "sleep") {
			t.Errorf("process 1: got %q, a container's program, want the pod's init", out)
		}
		one.Stop(0)
		two.Must("true")
	})
	t.Run("PID namespace of a TARGET container", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "p", harness.Namespaces(func(n *namespaces) { n.Pid = runtimeapi.NamespaceMode_CONTAINER })))
		defer p.Remove()
		target := p.Run(harness.ContainerConfig("target", harness.Busybox, harness.Shell("sleep 4321 & wait"),
			harness.Security(func(s *security) {
				s.NamespaceOptions.Pid = runtimeapi.NamespaceMode_CONTAINER
			})))
		debug := p.Run(harness.ContainerConfig("debug", harness.Busybox, harness.Sleep(), harness.Security(func(s *security) {
			s.NamespaceOptions = &namespaces{Pid: runtimeapi.NamespaceMode_TARGET, TargetId: target.ID}
		})))
		if out := debug.Must("ps"); !strings.Contains(out, "sleep 4321") {
			t.Errorf("ps: want the target's process in\n%s", out)
		}
	})
	t.Run("containers of a pod share net, ipc and uts", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "p"))
		defer p.Remove()
		one, two := p.Run(harness.ContainerConfig("one", harness.Busybox, harness.Sleep())),
			p.Run(harness.ContainerConfig("two", harness.Busybox, harness.Sleep()))
		for _, kind := range []string{"net", "ipc", "uts"} {
			if a, b := one.Must("readlink", "/proc/1/ns/"+kind), two.Must("readlink", "/proc/1/ns/"+kind); a != b {
				t.Errorf("%s namespaces: got %s and %s, want the same", kind, a, b)
			}
		}
		one.Must("sh", "-c", "echo shared >/dev/shm/x")
		if got := two.Must("cat", "/dev/shm/x"); got != "shared\n" {
			t.Errorf("/dev/shm of the other container: got %q, want shared", got)
		}
	})
}

func TestUsers(t *testing.T) {
	d := harness.StartDaemon(t)
	id := func(t *testing.T, image string, change func(*security)) string {
		return printed(t, d, harness.PodConfig(t, "p"), image, "id -u; id -g; id -G", change)
	}
	for name, c := range map[string]struct {
		image  string
		change func(*security)
		want   string
	}{
		"runtime should support RunAsUser":     {harness.Busybox, func(s *security) { s.RunAsUser = value(1001) }, "1001\n0\n0"},
		"runtime should support RunAsUserName": {harness.Busybox, func(s *security) { s.RunAsUsername = "nobody" }, "65534\n65534\n65534"},
		"runtime should support RunAsGroup": {harness.Busybox, func(s *security) { s.RunAsUser, s.RunAsGroup = value(1001), value(1002) },
			"1001\n1002\n1002"},
		"runtime should support SupplementalGroups": {harness.Busybox, func(s *security) { s.SupplementalGroups = []int64{1234, 5678} },
			"0\n0\n0 1234 5678"},
		"image user by uid":  {harness.ImagePrefix + "k8s-staging-cri-tools/test-image-user-uid", nil, "1002\n0\n0"},
		"image user by name": {harness.ImagePrefix + "k8s-staging-cri-tools/test-image-user-username", nil, "33\n33\n33"},
		"image user and group by id": {harness.ImagePrefix + "k8s-staging-cri-tools/test-image-user-uid-group", nil,
			"1003\n1004\n1004"},
		"image user by name and group by id": {harness.ImagePrefix + "k8s-staging-cri-tools/test-image-user-username-group", nil,
			"33\n1004\n1004"},
		"SupplementalGroupsPolicy Merge adds the groups of the image": {
			harness.ImagePrefix + "k8s-staging-cri-tools/test-image-predefined-group",
			func(s *security) {
				s.RunAsUser, s.RunAsGroup, s.SupplementalGroups = value(1000), value(1000), []int64{60000}
				s.SupplementalGroupsPolicy = runtimeapi.SupplementalGroupsPolicy_Merge
			}, "1000\n1000\n1000 50000 60000",
		},
		"SupplementalGroupsPolicy Strict does not": {
			harness.ImagePrefix + "k8s-staging-cri-tools/test-image-predefined-group",
			func(s *security) {
				s.RunAsUser, s.RunAsGroup, s.SupplementalGroups = value(1000), value(1000), []int64{60000}
				s.SupplementalGroupsPolicy = runtimeapi.SupplementalGroupsPolicy_Strict
			}, "1000\n1000\n1000 60000",
		},
	} {
		t.Run(name, func(t *testing.T) {
			if got := id(t, c.image, c.change); got != c.want {
				t.Errorf("output of id: got %q, want %q", got, c.want)
			}
		})
	}
	t.Run("runtime should return error if RunAsGroup is set without RunAsUser", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "p"))
		defer p.Remove()
		config := harness.ContainerConfig("c", harness.Busybox, harness.Security(func(s *security) { s.RunAsGroup = value(1) }))
		if msg := refused(t, d, p, config); !strings.Contains(msg, "run_as_group") {
			t.Errorf("refusal: got %q, want the name of the field", msg)
		}
	})
	t.Run("the status tells the user", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "p"))
		defer p.Remove()
		c := p.Run(harness.ContainerConfig("c", harness.Busybox, harness.Sleep(), harness.Security(func(s *security) {
			s.RunAsUser, s.SupplementalGroups = value(1001), []int64{7}
		})))
		if u := c.Status().GetUser().GetLinux(); u.GetUid() != 1001 || u.GetGid() != 0 {
			t.Errorf("user in the status: got %v, want 1001:0", u)
		}
	})
	t.Run("I2 huge and hostile passwd and group", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "p"))
		defer p.Remove()
		d.Pull(t, harness.HostileIDs)
		for _, user := range []string{"big", "negative"} {
			config := harness.ContainerConfig(user, harness.HostileIDs, harness.Security(func(s *security) { s.RunAsUsername = user }))
			refused(t, d, p, config)
		}
	})
}

// showCaps is a script that prints the capability sets of its process.
const showCaps = "grep Cap /proc/self/status"

func TestCapabilities(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	run := func(t *testing.T, script string, c *runtimeapi.Capability) string {
		return printed(t, d, harness.PodConfig(t, "p"), harness.Busybox, script, func(s *security) { s.Capabilities = c })
	}
	const bridge = "ip link add type bridge 2>&1 && echo made"
	t.Run("runtime should support adding capability", func(t *testing.T) {
		if got := run(t, bridge, &runtimeapi.Capability{AddCapabilities: []string{"NET_ADMIN"}}); !strings.HasSuffix(got, "made") {
			t.Errorf("creation of a bridge: got %q, want success", got)
		}
		if got := run(t, bridge, nil); strings.HasSuffix(got, "made") {
			t.Error("creation of a bridge without the capability succeeded, want a failure")
		}
	})
	t.Run("runtime should support dropping capability", func(t *testing.T) {
		const chown = "touch /x && chown 1 /x && echo done"
		if got := run(t, chown, nil); got != "done" {
			t.Errorf("chown: got %q, want success", got)
		}
		if got := run(t, chown, &runtimeapi.Capability{DropCapabilities: []string{"CAP_CHOWN"}}); got == "done" {
			t.Error("chown without the capability succeeded, want a failure")
		}
	})
	t.Run("runtime should support adding ALL capabilities", func(t *testing.T) {
		if got := run(t, bridge, &runtimeapi.Capability{AddCapabilities: []string{"ALL"}}); !strings.HasSuffix(got, "made") {
			t.Errorf("creation of a bridge: got %q, want success", got)
		}
	})
	t.Run("runtime should support dropping ALL capabilities", func(t *testing.T) {
		got := run(t, showCaps, &runtimeapi.Capability{DropCapabilities: []string{"ALL"}})
		for line := range strings.Lines(got) {
			if !strings.HasSuffix(strings.TrimSpace(line), "0000000000000000") {
				t.Errorf("capability set: got %q, want none", line)
			}
		}
	})
	t.Run("an unknown capability is refused", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "p"))
		defer p.Remove()
		refused(t, d, p, harness.ContainerConfig("c", harness.Busybox, harness.Security(func(s *security) {
			s.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"FLY"}}
		})))
	})
}

func TestPrivileged(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	run := func(t *testing.T, privileged bool) string {
		pod := harness.PodConfig(t, "p")
		pod.Linux.SecurityContext.Privileged = privileged
		return printed(t, d, pod, harness.Busybox, "ip link add type bridge 2>&1 && echo made", func(s *security) { s.Privileged = privileged })
	}
	t.Run("runtime should support Privileged is true", func(t *testing.T) {
		if got := run(t, true); !strings.HasSuffix(got, "made") {
			t.Errorf("creation of a bridge: got %q, want success", got)
		}
	})
	t.Run("runtime should support Privileged is false", func(t *testing.T) {
		if got := run(t, false); strings.HasSuffix(got, "made") {
			t.Error("creation of a bridge succeeded, want a failure")
		}
	})
	t.Run("privileged needs a privileged pod", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "p"))
		defer p.Remove()
		refused(t, d, p, harness.ContainerConfig("c", harness.Busybox, harness.Security(func(s *security) { s.Privileged = true })))
	})
}

func TestSELinuxIsRefusedByName(t *testing.T) {
	if _, err := os.Stat("/sys/fs/selinux/enforce"); err == nil {
		t.Skip("the kernel has SELinux, so labels are not refused")
	}
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	pod := harness.PodConfig(t, "labelled")
	pod.Linux.SecurityContext.SelinuxOptions = &runtimeapi.SELinuxOption{Type: "container_t"}
	_, err := d.CRI().RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: pod})
	wantCode(t, err, codes.Unimplemented)
	p := d.RunPod(t, harness.PodConfig(t, "p"))
	defer p.Remove()
	for _, o := range []*runtimeapi.SELinuxOption{{Type: "container_t"}, {Level: "s0:c1,c2"}, {Level: "s0,c1,c2"}} {
		message := refused(t, d, p, harness.ContainerConfig("c", harness.Busybox, harness.Security(func(s *security) { s.SelinuxOptions = o })))
		if !strings.Contains(message, "selinux_options") {
			t.Errorf("options %v: got %q, want an error that names the field", o, message)
		}
	}
	p.Create(harness.ContainerConfig("level", harness.Busybox, harness.Shell("sleep 60"), harness.Security(func(s *security) {
		s.SelinuxOptions = &runtimeapi.SELinuxOption{Level: "s0"}
	}))).Start()
}

func TestPathsOfTheRoot(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	run := func(t *testing.T, script string, change func(*security)) string {
		return printed(t, d, harness.PodConfig(t, "p"), harness.Busybox, script, change)
	}
	const write = "{ echo x >/test; } 2>/dev/null && echo written"
	t.Run("runtime should support that ReadOnlyRootfs is false", func(t *testing.T) {
		if got := run(t, write, nil); got != "written" {
			t.Errorf("write: got %q, want success", got)
		}
	})
	t.Run("runtime should support that ReadOnlyRootfs is true", func(t *testing.T) {
		if got := run(t, write, func(s *security) { s.ReadonlyRootfs = true }); got != "" {
			t.Errorf("write: got %q, want a failure", got)
		}
	})
	t.Run("runtime should support MaskedPaths", func(t *testing.T) {
		if got := run(t, "/bin/ls >/dev/null 2>&1 || echo masked", func(s *security) { s.MaskedPaths = []string{"/bin/ls"} }); got != "masked" {
			t.Errorf("masked program: got %q, want masked", got)
		}
	})
	t.Run("runtime should support ReadonlyPaths", func(t *testing.T) {
		if got := run(t, "touch /tmp/x 2>&1; touch /root/x && echo elsewhere",
			func(s *security) { s.ReadonlyPaths = []string{"/tmp"} }); !strings.Contains(got, "Read-only") || !strings.HasSuffix(got, "elsewhere") {
			t.Errorf("writes: got %q, want only the one outside the read-only path to succeed", got)
		}
	})
	t.Run("the usual paths are masked by default", func(t *testing.T) {
		if got := run(t, "cat /proc/keys | wc -c; { echo x >/proc/sys/kernel/domainname; } 2>/dev/null || echo refused",
			nil); got != "0\nrefused" {
			t.Errorf("masked and read-only paths: got %q, want 0 and refused", got)
		}
	})
	t.Run("a kubelet's empty lists mean procMount: Unmasked", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "p"))
		defer p.Remove()
		c := p.Create(harness.ContainerConfig("c", harness.Busybox, harness.Shell("grep -c ' /proc/' /proc/self/mounts"),
			func(c *runtimeapi.ContainerConfig) {
				c.Labels = map[string]string{"io.kubernetes.container.name": "c"}
			}))
		c.Start()
		c.WaitState(runtimeapi.ContainerState_CONTAINER_EXITED)
		if got := strings.TrimSpace(harness.Text(c.Logs(), "")); got != "0" {
			t.Errorf("mounts below /proc: got %q, want none", got)
		}
	})
	t.Run("C6 a working directory below /proc is refused", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "p"))
		defer p.Remove()
		for _, dir := range []string{"/proc/self/fd/7", "relative", "/proc/1/root"} {
			config := harness.ContainerConfig("c", harness.Busybox, harness.Shell("pwd"))
			config.WorkingDir = dir
			refused(t, d, p, config)
		}
	})
	t.Run("C6 no descriptor of the daemon reaches a container", func(t *testing.T) {
		if got := run(t, "ls /proc/self/fd | wc -l", nil); got != "4" { // 0, 1, 2 and the directory that ls reads
			t.Errorf("descriptors in the container: got %s, want 4", got)
		}
	})
	t.Run("I3 paths of the image that lead out of it stay inside", func(t *testing.T) {
		p := d.RunPod(t, harness.PodConfig(t, "p"))
		defer p.Remove()
		d.Pull(t, harness.Symlinks)
		victim := filepath.Join(t.TempDir(), "volume")
		if err := os.Mkdir(victim, 0o755); err != nil {
			t.Fatal(err)
		}
		config := harness.ContainerConfig("c", harness.Symlinks, harness.Sleep())
		config.Mounts = []*runtimeapi.Mount{{HostPath: victim, ContainerPath: "/data"}}
		resp, err := d.CRI().CreateContainer(context.Background(),
			&runtimeapi.CreateContainerRequest{PodSandboxId: p.ID, Config: config, SandboxConfig: p.Config})
		if err != nil {
			return // the container was refused
		}
		if _, err := d.CRI().StartContainer(context.Background(), &runtimeapi.StartContainerRequest{ContainerId: resp.ContainerId}); err != nil {
			return
		}
		mounts, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(mounts), " /etc ") {
			t.Errorf("the volume is mounted on the node's /etc:\n%s", mounts)
		}
	})
}
