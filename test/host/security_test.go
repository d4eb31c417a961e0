package host

import (
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestAppArmorIsEnforced: the default profile is in force, and so is one of the host, whose denials the kernel logs.
func TestAppArmorIsEnforced(t *testing.T) {
	client := node.cri(t)
	profileOf := func(container string) string {
		return node.run(t, "cat /proc/$(tripod inspect %s | jq -r .info.info.pid)/attr/current", container)
	}
	for _, handler := range []string{"crun", "runc"} {
		if got := profileOf(runContainer(t, client, handler)); got != "tripod-default (enforce)\n" {
			t.Errorf("profile of a container of %s: got %q, want tripod-default in force", handler, got)
		}
	}
	node.run(t, `printf 'profile test-denies flags=(attach_disconnected,mediate_deleted) { file, network, capability, signal, audit deny /denied w, }' | apparmor_parser --replace`)
	since := strings.TrimSpace(node.run(t, "date +%%s"))
	id := runContainer(t, client, "crun", func(_ *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext.Apparmor = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost,
			LocalhostRef: "test-denies"}
	})
	if out, err := node.try(t, "tripod exec %s sh -c 'echo x >/allowed && echo x >/denied'", id); err == nil ||
		!strings.Contains(out, "/denied") {
		t.Errorf("write that the profile denies: got error %v: %s", err, out)
	}
	if log := node.run(t, "journalctl --dmesg --since @%s | grep 'apparmor=\"DENIED\".*test-denies' || true", since); !strings.Contains(log,
		"/denied") {
		t.Errorf("the kernel's log of the denial: got %q", log)
	}
}

// inUserNamespace puts a pod into a user namespace, with a range that the node chooses.
func inUserNamespace(pod *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig) {
	users := &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD}
	pod.Linux.SecurityContext.NamespaceOptions.UsernsOptions, c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = users, users
}

// TestUserNamespace: root of a pod with a user namespace is nobody on the host, owns its files, has the limits of its unit, and
// runs on when the daemon is killed.
func TestUserNamespace(t *testing.T) {
	client := node.cri(t)
	for _, handler := range []string{"crun", "runc"} {
		t.Run(handler, func(t *testing.T) {
			id := runContainer(t, client, handler, inUserNamespace, func(_ *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig) {
				c.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 96 << 20}
			})
			out := node.run(t, `pid=$(tripod inspect %[1]s | jq -r .info.info.pid); awk '{print $1, ($2 >= 65536), $3}' /proc/$pid/uid_map; [ $(stat -c %%u /proc/$pid) -ge 65536 ] && echo "nobody on the host"
			cat %[2]s/memory.max
			systemctl kill --signal KILL tripod; %[3]s
			tripod exec %[1]s sh -c 'id -u; touch /new && stat -c %%u /new /etc'`, id, cgroupOf(t, id), answers)
			if want := "0 1 65536\nnobody on the host\n100663296\n0\n0\n0\n"; out != want {
				t.Errorf("the map, the owner on the host, the limit, and the user and owners inside: got %q, want %q", out, want)
			}
		})
	}
}

// TestCgroupsAreReadOnly: no container can write to its cgroup, also root of a user namespace and one with CAP_SYS_ADMIN and a
// cgroup namespace of its own, whose mount of cgroup v2 would show the container's limits as its own files.
func TestCgroupsAreReadOnly(t *testing.T) {
	client := node.cri(t)
	admin := func(_ *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"SYS_ADMIN"}}
	}
	for _, handler := range []string{"crun", "runc"} {
		for name, change := range map[string][]func(*runtimeapi.PodSandboxConfig, *runtimeapi.ContainerConfig){"plain": nil,
			"user namespace": {inUserNamespace}, "administrator": {admin}} {
			t.Run(handler+"/"+name, func(t *testing.T) {
				id := runContainer(t, client, handler, append(change, func(_ *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig) {
					c.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 96 << 20}
				})...)
				out := node.run(t, `tripod exec %s sh -c 'exec 2>&1; cat /proc/self/cgroup; cat /sys/fs/cgroup/memory.max; echo max >/sys/fs/cgroup/memory.max; mkdir /sys/fs/cgroup/new; true'`, id)
				if !strings.HasPrefix(out, "0::/\n") || strings.Count(out, "Read-only file system") != 2 {
					t.Errorf("cgroup, limit and writes inside: got %q, want the root of a namespace and two refusals", out)
				}
				if got := node.run(t, "cat %s/memory.max", cgroupOf(t, id)); got != "100663296\n" {
					t.Errorf("memory.max of the unit: got %q, want the limit", got)
				}
			})
		}
	}
}
