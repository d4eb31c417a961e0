package vm

import (
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/volumes"
	"github.com/tripod-run/tripod/test/sandboxtest/corpus"
)

// acceptedPod returns a pod and a container in which every accepted field is set.
func acceptedPod() (*runtimeapi.PodSandboxConfig, *runtimeapi.ContainerConfig) {
	runtimeDefault := &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
	namespaces := &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER}
	pod := &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "p", Namespace: "default", Uid: "u"}, Hostname: "p", LogDirectory: "/var/log/pods/x",
		DnsConfig:    &runtimeapi.DNSConfig{Servers: []string{"10.0.0.10"}},
		PortMappings: []*runtimeapi.PortMapping{{HostPort: 8080, ContainerPort: 80}},
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent: "/kubepods/pod1", Overhead: &runtimeapi.LinuxContainerResources{},
			Resources: &runtimeapi.LinuxContainerResources{CpuShares: 2},
			Sysctls:   map[string]string{"net.ipv4.ip_unprivileged_port_start": "0"},
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				NamespaceOptions: namespaces, Seccomp: runtimeDefault, RunAsUser: &runtimeapi.Int64Value{Value: 1000},
				SupplementalGroups: []int64{2000},
			},
		},
	}
	container := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "c"}, Image: &runtimeapi.ImageSpec{Image: "x"}, LogPath: "c/0.log", WorkingDir: "/",
		Tty: true, Stdin: true,
		Envs: []*runtimeapi.KeyValue{{Key: "KUBERNETES_SERVICE_HOST", Value: []byte("10.0.0.1")}},
		Mounts: []*runtimeapi.Mount{
			{ContainerPath: "/etc/hosts", HostPath: "/etc/hosts"}, {ContainerPath: "/dev/termination-log", HostPath: "/etc/passwd"},
			{ContainerPath: "/var/run/secrets/kubernetes.io/serviceaccount", HostPath: "/tmp", Readonly: true, SelinuxRelabel: true},
		},
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources: &runtimeapi.LinuxContainerResources{
				CpuShares: 2, CpuPeriod: 100_000, OomScoreAdj: 1000, MemoryLimitInBytes: 64 << 20, MemorySwapLimitInBytes: 64 << 20,
				HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB"}}, Unified: map[string]string{"memory.oom.group": "1"}, CpusetCpus: "0",
			},
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
				NamespaceOptions: namespaces, Seccomp: runtimeDefault, Apparmor: runtimeDefault, SelinuxOptions: &runtimeapi.SELinuxOption{Level: "s0"},
				NoNewPrivs: true,
				RunAsUser:  &runtimeapi.Int64Value{Value: 0}, RunAsGroup: &runtimeapi.Int64Value{Value: 1000}, SupplementalGroups: []int64{2000},
				Capabilities: &runtimeapi.Capability{DropCapabilities: []string{"ALL"}},
				MaskedPaths:  []string{"/proc/kcore"}, ReadonlyPaths: []string{"/proc/sys"},
			},
		},
	}
	return pod, container
}

// TestWhatAKubeletSends: every request in the corpus is accepted, except for the node's network. Machines do not get
// the kubelet's termination message file.
func TestWhatAKubeletSends(t *testing.T) {
	b := &Backend{cfg: settings{Config: Config{VM: config.Default().VM, Annotations: sandbox.AllowList{"*"}}}}
	for _, c := range corpus.Pods(t) {
		c.MoveBelow(t, t.TempDir())
		p := &sandbox.Pod{ID: hashOf(c.Name), Config: c.Sandbox}
		v, err := volumes.Of(c.Container, machine.ShareVirtiofs)
		err = errors.Join(b.Validate(p, nil), b.Validate(p, &sandbox.Container{ID: p.ID, Config: c.Container}), err)
		if hostNetwork := c.Name == "host-network"; (err != nil) != hostNetwork || hostNetwork && !errdefs.IsNotImplemented(err) {
			t.Errorf("%s: error = %v", c.Name, err)
		}
		if got, want := len(v.Mounts), len(c.Container.GetMounts())-1; got != want {
			t.Errorf("%s: the guest gets %d mounts, want %d: %v", c.Name, got, want, v.Mounts)
		}
		p.Config = c.InUserNamespace().Sandbox
		mapped := errors.Join(b.Validate(p, nil), b.Validate(p, &sandbox.Container{ID: p.ID, Config: c.Container}))
		if (mapped != nil) != (err != nil) {
			t.Errorf("%s in a user namespace: error = %v, want the same as without: %v", c.Name, mapped, err)
		}
	}
}

// TestEnforcedOrRefused: fields that machines do not support are refused, and the error names the field (rule 6 of the
// lifecycle).
func TestEnforcedOrRefused(t *testing.T) {
	b := &Backend{cfg: settings{Config: Config{VM: config.Default().VM, Annotations: sandbox.AllowList{"*"}}}}
	type pod = runtimeapi.PodSandboxConfig
	type ctr = runtimeapi.ContainerConfig
	localhost := &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: "x"}
	node := runtimeapi.NamespaceMode_NODE
	for field, c := range map[string]struct {
		change func(*pod, *ctr)
		is     func(error) bool
	}{
		"linux.security_context.privileged": {func(_ *pod, c *ctr) { c.Linux.SecurityContext.Privileged = true }, errdefs.IsNotImplemented},
		"linux.security_context.readonly_rootfs": {func(_ *pod, c *ctr) { c.Linux.SecurityContext.ReadonlyRootfs = true },
			errdefs.IsNotImplemented},
		"linux.security_context.capabilities": {func(_ *pod,
			c *ctr) {
			c.Linux.SecurityContext.Capabilities.AddCapabilities = []string{"NET_ADMIN"}
		}, errdefs.IsNotImplemented},
		"linux.security_context.seccomp": {func(_ *pod, c *ctr) { c.Linux.SecurityContext.Seccomp = localhost },
			errdefs.IsNotImplemented},
		"linux.security_context.apparmor": {func(p *pod, _ *ctr) { p.Linux.SecurityContext.Apparmor = localhost },
			errdefs.IsNotImplemented},
		"linux.security_context.selinux_options": {func(_ *pod, c *ctr) {
			c.Linux.SecurityContext.SelinuxOptions = &runtimeapi.SELinuxOption{Level: "s0:c1"}
		}, errdefs.IsNotImplemented},
		"namespace_options.network": {func(p *pod, _ *ctr) { p.Linux.SecurityContext.NamespaceOptions.Network = node },
			errdefs.IsNotImplemented},
		"namespace_options.pid": {func(p *pod, _ *ctr) { p.Linux.SecurityContext.NamespaceOptions.Pid = node },
			errdefs.IsNotImplemented},
		"namespace_options.ipc": {func(_ *pod, c *ctr) { c.Linux.SecurityContext.NamespaceOptions.Ipc = node },
			errdefs.IsNotImplemented},
		"linux.sysctls": {func(p *pod, _ *ctr) { p.Linux.Sysctls["net.core.somaxconn"] = "1" }, errdefs.IsNotImplemented},
		"windows": {func(p *pod, _ *ctr) { p.Windows = &runtimeapi.WindowsPodSandboxConfig{} },
			errdefs.IsInvalidArgument},
		"command":     {func(_ *pod, c *ctr) { c.Command = []string{"sh"} }, errdefs.IsNotImplemented},
		"args[0]":     {func(_ *pod, c *ctr) { c.Args = []string{"a\nb"} }, errdefs.IsInvalidArgument},
		"working_dir": {func(_ *pod, c *ctr) { c.WorkingDir = "/srv" }, errdefs.IsNotImplemented},
		"envs":        {func(_ *pod, c *ctr) { c.Envs[0].Key = "A=B" }, errdefs.IsInvalidArgument},
		"linux.resources.memory_limit_in_bytes": {func(_ *pod, c *ctr) { c.Linux.Resources.MemoryLimitInBytes = 1 << 20 },
			errdefs.IsInvalidArgument},
		"linux.resources.cpu_quota":  {func(_ *pod, c *ctr) { c.Linux.Resources.CpuQuota = 7 }, errdefs.IsInvalidArgument},
		"linux.resources.cpu_period": {func(_ *pod, c *ctr) { c.Linux.Resources.CpuPeriod = 7 }, errdefs.IsInvalidArgument},
		"linux.resources.unified":    {func(_ *pod, c *ctr) { c.Linux.Resources.Unified["pids.max"] = "1" }, errdefs.IsNotImplemented},
		"mounts[0].image": {func(_ *pod, c *ctr) { c.Mounts[0].Image = &runtimeapi.ImageSpec{Image: "x"} },
			errdefs.IsNotImplemented},
		"mounts[1].propagation": {func(_ *pod,
			c *ctr) {
			c.Mounts[1].Propagation = runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL
		}, errdefs.IsNotImplemented},
		"mounts[2].container_path": {func(_ *pod, c *ctr) { c.Mounts[2].ContainerPath = "/etc//hosts" }, errdefs.IsInvalidArgument},
		"mounts[0].mount_options": {func(_ *pod, c *ctr) { c.Mounts[0].MountOptions = []string{"noexec"} },
			errdefs.IsNotImplemented},
		"mounts[0].host_path": {func(_ *pod, c *ctr) {
			c.Mounts[0].HostPath = "/var/lib/kubelet/pods/x/volumes/virtlet~flexvolume_driver/data"
		}, errdefs.IsNotImplemented},
		"log_path": {func(_ *pod, c *ctr) { c.LogPath = "../x" }, errdefs.IsInvalidArgument},
		"VirtletVCPUCount": {func(p *pod, _ *ctr) { p.Annotations = map[string]string{"VirtletVCPUCount": "0"} },
			errdefs.IsInvalidArgument},
		"tripod.dev/vm.disk-driver": {func(p *pod, _ *ctr) { p.Annotations = map[string]string{"tripod.dev/vm.disk-driver": "ide"} },
			errdefs.IsInvalidArgument},
	} {
		t.Run(field, func(t *testing.T) {
			pod, container := acceptedPod()
			pod, container = proto.CloneOf(pod), proto.CloneOf(container)
			c.change(pod, container)
			p := &sandbox.Pod{ID: hashOf("p"), Config: pod}
			err := b.Validate(p, nil)
			if err == nil {
				err = b.Validate(p, &sandbox.Container{ID: p.ID, Config: container})
			}
			if !c.is(err) || !strings.Contains(err.Error(), field) {
				t.Errorf("Validate error = %v, want a refusal that names %s", err, field)
			}
		})
	}
}
