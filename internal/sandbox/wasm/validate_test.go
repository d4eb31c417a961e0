package wasm

import (
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/annotations"
	"github.com/tripod-run/tripod/test/sandboxtest/corpus"
)

// kubelets returns a pod and container with every accepted field set.
func kubelets() (*runtimeapi.PodSandboxConfig, *runtimeapi.ContainerConfig) {
	runtimeDefault := &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
	namespaces := &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER}
	pod := &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "p", Namespace: "default", Uid: "u"}, Hostname: "p", LogDirectory: "/var/log/pods/x",
		DnsConfig: &runtimeapi.DNSConfig{Servers: []string{"10.0.0.10"}},
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
		Envs: []*runtimeapi.KeyValue{{Key: "KUBERNETES_SERVICE_HOST", Value: []byte("10.0.0.1")}},
		Mounts: []*runtimeapi.Mount{
			{ContainerPath: "/etc/hosts", HostPath: "/etc/hosts"}, {ContainerPath: "/dev/termination-log", HostPath: "/etc/passwd"},
			{ContainerPath: "/var/run/secrets/kubernetes.io/serviceaccount", HostPath: "/tmp", Readonly: true, SelinuxRelabel: true},
		},
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources: &runtimeapi.LinuxContainerResources{
				CpuShares: 2, CpuPeriod: 100_000, OomScoreAdj: 1000, MemoryLimitInBytes: 64 << 20, MemorySwapLimitInBytes: 64 << 20,
				HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB"}}, Unified: map[string]string{"memory.oom.group": "1"},
			},
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
				NamespaceOptions: namespaces, Seccomp: runtimeDefault, Apparmor: runtimeDefault, SelinuxOptions: &runtimeapi.SELinuxOption{Level: "s0"},
				NoNewPrivs: true, ReadonlyRootfs: true,
				RunAsUser: &runtimeapi.Int64Value{Value: 1000}, RunAsGroup: &runtimeapi.Int64Value{Value: 1000}, SupplementalGroups: []int64{2000},
				Capabilities: &runtimeapi.Capability{DropCapabilities: []string{"ALL"}},
				MaskedPaths:  []string{"/proc/kcore"}, ReadonlyPaths: []string{"/proc/sys"},
			},
		},
	}
	return pod, container
}

// TestWhatAKubeletSends checks that every request in the corpus is valid, with shared workers and with a worker per
// pod.
func TestWhatAKubeletSends(t *testing.T) {
	for _, workers := range []WorkerMode{WorkerPerNode, WorkerPerPod} {
		b := &Backend{cfg: setup{Config: Config{Workers: workers, Annotations: sandbox.AllowList{"*"}}.withDefaults()}}
		for _, c := range corpus.Pods(t) {
			c.MoveBelow(t, t.TempDir())
			p := &sandbox.Pod{ID: hashOf(c.Name), Config: c.Sandbox}
			_, err := checkMounts(c.Container)
			if err = errors.Join(b.Validate(p, nil), b.Validate(p, &sandbox.Container{ID: p.ID, Config: c.Container}), err); err != nil {
				t.Errorf("Validate of %s with a worker per %s = %v", c.Name, workers, err)
			}
			p.Config = c.InUserNamespace().Sandbox
			if err := errors.Join(b.Validate(p, nil), b.Validate(p, &sandbox.Container{ID: p.ID, Config: c.Container})); err != nil {
				t.Errorf("Validate of %s in a user namespace = %v", c.Name, err)
			}
		}
	}
}

// TestEnforcedOrRefused checks that unsupported fields are refused, and that the error names the field (rule 6 of the
// lifecycle).
func TestEnforcedOrRefused(t *testing.T) {
	b := &Backend{cfg: setup{Config: Config{Annotations: sandbox.AllowList{"*"}}.withDefaults()}}
	type pod = runtimeapi.PodSandboxConfig
	type ctr = runtimeapi.ContainerConfig
	localhost := &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: "x"}
	for field, c := range map[string]struct {
		change func(*pod, *ctr)
		is     func(error) bool
	}{
		"linux.security_context.privileged": {func(_ *pod, c *ctr) { c.Linux.SecurityContext.Privileged = true }, errdefs.IsNotImplemented},
		"linux.security_context.capabilities": {func(_ *pod,
			c *ctr) {
			c.Linux.SecurityContext.Capabilities.AddCapabilities = []string{"NET_ADMIN"}
		}, errdefs.IsNotImplemented},
		"linux.security_context.seccomp":  {func(_ *pod, c *ctr) { c.Linux.SecurityContext.Seccomp = localhost }, errdefs.IsNotImplemented},
		"linux.security_context.apparmor": {func(p *pod, _ *ctr) { p.Linux.SecurityContext.Apparmor = localhost }, errdefs.IsNotImplemented},
		"linux.security_context.selinux_options": {func(_ *pod, c *ctr) {
			c.Linux.SecurityContext.SelinuxOptions = &runtimeapi.SELinuxOption{Level: "s0:c1"}
		}, errdefs.IsNotImplemented},
		"namespace_options.pid": {func(p *pod,
			_ *ctr) {
			p.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_NODE
		}, errdefs.IsNotImplemented},
		"namespace_options.ipc": {func(_ *pod,
			c *ctr) {
			c.Linux.SecurityContext.NamespaceOptions.Ipc = runtimeapi.NamespaceMode_NODE
		}, errdefs.IsNotImplemented},
		"linux.sysctls": {func(p *pod, _ *ctr) { p.Linux.Sysctls["net.core.somaxconn"] = "1" }, errdefs.IsNotImplemented},
		"windows": {func(p *pod, _ *ctr) { p.Windows = &runtimeapi.WindowsPodSandboxConfig{} },
			errdefs.IsInvalidArgument},
		"devices": {func(_ *pod, c *ctr) { c.Devices = []*runtimeapi.Device{{HostPath: "/dev/kvm"}} },
			errdefs.IsNotImplemented},
		"CDI_devices": {func(_ *pod, c *ctr) { c.CDIDevices = []*runtimeapi.CDIDevice{{Name: "x"}} },
			errdefs.IsNotImplemented},
		"tty":                                   {func(_ *pod, c *ctr) { c.Tty = true }, errdefs.IsNotImplemented},
		"working_dir":                           {func(_ *pod, c *ctr) { c.WorkingDir = "/srv" }, errdefs.IsNotImplemented},
		"envs":                                  {func(_ *pod, c *ctr) { c.Envs[0].Key = "A=B" }, errdefs.IsInvalidArgument},
		"linux.resources.memory_limit_in_bytes": {func(_ *pod, c *ctr) { c.Linux.Resources.MemoryLimitInBytes = -2 }, errdefs.IsInvalidArgument},
		"linux.resources.cpu_quota":             {func(_ *pod, c *ctr) { c.Linux.Resources.CpuQuota = 7 }, errdefs.IsInvalidArgument},
		"linux.resources.cpu_period":            {func(_ *pod, c *ctr) { c.Linux.Resources.CpuPeriod = 7 }, errdefs.IsInvalidArgument},
		"linux.resources.cpuset_cpus": {func(_ *pod, c *ctr) { c.Linux.Resources.CpusetCpus, c.Linux.Resources.CpuQuota = "0", -1 },
			errdefs.IsNotImplemented},
		"linux.resources.unified": {func(_ *pod, c *ctr) { c.Linux.Resources.Unified["pids.max"] = "1" }, errdefs.IsNotImplemented},
		"mounts[0].image": {func(_ *pod, c *ctr) { c.Mounts[0].Image = &runtimeapi.ImageSpec{Image: "x"} },
			errdefs.IsNotImplemented},
		"mounts[1].propagation": {func(_ *pod,
			c *ctr) {
			c.Mounts[1].Propagation = runtimeapi.MountPropagation_PROPAGATION_BIDIRECTIONAL
		}, errdefs.IsNotImplemented},
		"mounts[2].container_path": {func(_ *pod, c *ctr) { c.Mounts[2].ContainerPath = "/etc//hosts" }, errdefs.IsInvalidArgument},
		"log_path":                 {func(_ *pod, c *ctr) { c.LogPath = "../x" }, errdefs.IsInvalidArgument},
		"annotation vimana.host/port": {func(p *pod, _ *ctr) { p.Annotations = map[string]string{"vimana.host/port": "http"} },
			errdefs.IsInvalidArgument},
		"annotation vimana.host/tls: the container has no mount": {func(p *pod,
			_ *ctr) {
			p.Annotations = map[string]string{"vimana.host/tls": "/tls"}
		}, errdefs.IsInvalidArgument},
	} {
		t.Run(field, func(t *testing.T) {
			pod, container := kubelets()
			pod, container = proto.CloneOf(pod), proto.CloneOf(container)
			c.change(pod, container)
			p := &sandbox.Pod{ID: hashOf("p"), Config: pod}
			err := b.Validate(p, nil)
			if err == nil {
				err = b.Validate(p, &sandbox.Container{ID: p.ID, Config: container})
			}
			if !c.is(err) || !strings.Contains(err.Error(), field) {
				t.Errorf("Validate = %v, want an error for %s", err, field)
			}
		})
	}
	for _, id := range []string{"", "x", strings.Repeat("g", 64), "../../x", "a/b#0", "#0"} {
		pod, _ := kubelets()
		if err := b.Validate(&sandbox.Pod{ID: id, Config: pod}, nil); !errdefs.IsInvalidArgument(err) {
			t.Errorf("Validate of a pod with ID %q = %v, want ErrInvalidArgument", id, err)
		}
	}
}

// TestConcurrencyIsBounded checks that a pod cannot set a higher concurrency than wasm.max_concurrency.
func TestConcurrencyIsBounded(t *testing.T) {
	b := &Backend{cfg: setup{Config: Config{Concurrency: 10, Annotations: sandbox.AllowList{"*"}}.withDefaults()}}
	for value, wrong := range map[string]bool{"10": false, "11": true} {
		pod, _ := kubelets()
		pod = proto.CloneOf(pod)
		pod.Annotations = map[string]string{b.cfg.LabelPrefix + annotations.KeyConcurrency: value}
		err := b.Validate(&sandbox.Pod{ID: hashOf("p"), Config: pod}, nil)
		if wrong != errdefs.IsInvalidArgument(err) || wrong && !strings.Contains(err.Error(), "wasm.max_concurrency") {
			t.Errorf("Validate with concurrency %s = %v, want refused %v", value, err, wrong)
		}
	}
}
