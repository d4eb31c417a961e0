package spec

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

func TestValidateNil(t *testing.T) {
	requireRefused(t, Validate(nil, nil, fullHost()), errInvalid, "config")
	requireRefused(t, Validate(&sandbox.Pod{}, nil, fullHost()), errInvalid, "config")
	requireRefused(t, Validate(testPod(), &sandbox.Container{}, fullHost()), errInvalid, "config")
	empty := &sandbox.Pod{Config: &runtimeapi.PodSandboxConfig{}}
	require.NoError(t, Validate(empty, nil, Host{}))
	require.NoError(t, Validate(empty, &sandbox.Container{Config: &runtimeapi.ContainerConfig{}}, Host{}))
}

func TestValidatePodRefused(t *testing.T) {
	options := func(o *runtimeapi.NamespaceOption) func(*runtimeapi.LinuxPodSandboxConfig) {
		return func(l *runtimeapi.LinuxPodSandboxConfig) { l.SecurityContext.NamespaceOptions = o }
	}
	for _, c := range []struct {
		change func(*runtimeapi.LinuxPodSandboxConfig)
		class  error
		field  string
	}{
		{func(l *runtimeapi.LinuxPodSandboxConfig) { l.SecurityContext.RunAsGroup = int64Value(1) }, errInvalid, "run_as_group"},
		{func(l *runtimeapi.LinuxPodSandboxConfig) { l.SecurityContext.RunAsUser = int64Value(1 << 31) }, errInvalid, "run_as_user"},
		{func(l *runtimeapi.LinuxPodSandboxConfig) { l.CgroupParent = "/a/../../b" }, errInvalid, "cgroup_parent"},
		{func(l *runtimeapi.LinuxPodSandboxConfig) { l.SecurityContext.SeccompProfilePath = "junk" }, errInvalid, "seccomp"},
		{func(l *runtimeapi.LinuxPodSandboxConfig) { l.SecurityContext.Apparmor = localhostProfile("x") }, errUnsupported, "apparmor"},
		{func(l *runtimeapi.LinuxPodSandboxConfig) {
			l.SecurityContext.SelinuxOptions = &runtimeapi.SELinuxOption{Level: "s0:c1"}
		}, errUnsupported, "selinux_options"},
		{options(&runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_CONTAINER}), errUnsupported, "network"},
		{options(&runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_TARGET, TargetId: "x"}), errInvalid, "pid"},
		{options(&runtimeapi.NamespaceOption{Ipc: runtimeapi.NamespaceMode_TARGET}), errInvalid, "ipc"},
		{options(&runtimeapi.NamespaceOption{Pid: 9}), errInvalid, "pid"},
		{options(&runtimeapi.NamespaceOption{UsernsOptions: &runtimeapi.UserNamespace{}}), errInvalid, "userns_options"},
	} {
		p := testPod()
		c.change(p.Config.Linux)
		requireRefused(t, Validate(p, nil, fullHost()), c.class, c.field)
	}
	p := testPod()
	p.Config.Windows = &runtimeapi.WindowsPodSandboxConfig{}
	requireRefused(t, Validate(p, nil, fullHost()), errInvalid, "windows")
	p = testPod()
	p.Config.Linux.SecurityContext.NamespaceOptions = &runtimeapi.NamespaceOption{UsernsOptions: &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_NODE}}
	require.NoError(t, Validate(p, nil, fullHost()))
	for _, parent := range []string{"", "/", "/kubepods/burstable/pod1", "kubepods-burstable-pod1.slice"} {
		p.Config.Linux.CgroupParent = parent
		require.NoError(t, Validate(p, nil, fullHost()), parent)
	}
}

func TestValidateContainerRefused(t *testing.T) {
	options := func(o *runtimeapi.NamespaceOption) func(*runtimeapi.ContainerConfig) {
		return func(c *runtimeapi.ContainerConfig) { c.Linux.SecurityContext.NamespaceOptions = o }
	}
	for _, c := range []struct {
		change func(*runtimeapi.ContainerConfig)
		class  error
		field  string
	}{
		{func(c *runtimeapi.ContainerConfig) { c.Windows = &runtimeapi.WindowsContainerConfig{} }, errInvalid, "windows"},
		{func(c *runtimeapi.ContainerConfig) { c.LogPath = "../other/0.log" }, errInvalid, "log_path"},
		{func(c *runtimeapi.ContainerConfig) { c.Command = []string{"a\x00"} }, errInvalid, "command"},
		{func(c *runtimeapi.ContainerConfig) { c.Args = []string{"a\x00"} }, errInvalid, "args"},
		{func(c *runtimeapi.ContainerConfig) { c.WorkingDir = "/proc/self/fd/7" }, errInvalid, "working_dir"},
		{func(c *runtimeapi.ContainerConfig) { c.StopSignal = 999 }, errInvalid, "stop_signal"},
		{func(c *runtimeapi.ContainerConfig) {
			c.Annotations = map[string]string{"blockio.resources.beta.kubernetes.io/pod": "slow"}
		}, errUnsupported, "blockio"},
		{func(c *runtimeapi.ContainerConfig) { c.Envs = []*runtimeapi.KeyValue{{Value: []byte("x")}} }, errInvalid, "envs"},
		{func(c *runtimeapi.ContainerConfig) { c.Envs = []*runtimeapi.KeyValue{{Key: "A=B"}} }, errInvalid, "envs"},
		{func(c *runtimeapi.ContainerConfig) {
			c.Envs = []*runtimeapi.KeyValue{{Key: "LATIN1", Value: []byte{0xe9}}}
		}, errInvalid, `"LATIN1"`},
		{func(c *runtimeapi.ContainerConfig) {
			c.Envs = []*runtimeapi.KeyValue{{Key: "N", Value: []byte{0}}}
		}, errInvalid, "NUL"},
		{func(c *runtimeapi.ContainerConfig) { c.Linux.SecurityContext.Privileged = true }, errInvalid, "privileged"},
		{func(c *runtimeapi.ContainerConfig) {
			c.Linux.SecurityContext.SelinuxOptions = &runtimeapi.SELinuxOption{Type: "x"}
		}, errUnsupported, "selinux_options"},
		{options(&runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE}), errInvalid, "network"},
		{options(&runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_NODE}), errInvalid, "pid"},
		{options(&runtimeapi.NamespaceOption{Ipc: runtimeapi.NamespaceMode_NODE}), errInvalid, "ipc"},
		{options(&runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_TARGET}), errInvalid, "target_id"},
		{options(&runtimeapi.NamespaceOption{TargetId: "x"}), errInvalid, "target_id"},
	} {
		container := testContainer()
		c.change(container.Config)
		requireRefused(t, Validate(testPod(), container, fullHost()), c.class, c.field)
	}
}

func TestContainerModes(t *testing.T) {
	const (
		pod, own = runtimeapi.NamespaceMode_POD, runtimeapi.NamespaceMode_CONTAINER
		node     = runtimeapi.NamespaceMode_NODE
		target   = runtimeapi.NamespaceMode_TARGET
	)
	for _, c := range []struct{ pods, mine, want Modes }{
		{Modes{}, Modes{}, Modes{Network: pod, PID: pod, IPC: pod}},
		{Modes{Network: node, PID: node, IPC: node}, Modes{}, Modes{Network: node, PID: node, IPC: node}},
		{Modes{PID: own}, Modes{}, Modes{PID: own}},
		{Modes{PID: own}, Modes{PID: target, Target: "t"}, Modes{PID: target, Target: "t"}},
		{Modes{Network: node, PID: node}, Modes{PID: own, IPC: own}, Modes{Network: node, PID: own, IPC: own}},
	} {
		p, container := testPod(), testContainer()
		set := func(m Modes) *runtimeapi.NamespaceOption {
			return &runtimeapi.NamespaceOption{Network: m.Network, Pid: m.PID, Ipc: m.IPC, TargetId: m.Target}
		}
		p.Config.Linux.SecurityContext.NamespaceOptions = set(c.pods)
		container.Config.Linux.SecurityContext.NamespaceOptions = set(c.mine)
		require.NoError(t, Validate(p, container, fullHost()))
		got := ContainerModes(p, container)
		assert.Equal(t, c.want, got)
		assert.Equal(t, c.pods.Network != node, got.UTS())
	}
}

// TestHarmless checks the table Harmless: each row has an example that a bare host accepts.
func TestHarmless(t *testing.T) {
	bare := Host{HugepageSizes: []string{"2MB"}, Controllers: map[string]bool{"cpu": true}}
	examples := map[string]func(*sandbox.Pod, *runtimeapi.ContainerConfig){
		"mounts.selinux_relabel": func(_ *sandbox.Pod, c *runtimeapi.ContainerConfig) {
			c.Mounts = []*runtimeapi.Mount{{HostPath: "/tmp", ContainerPath: "/a", SelinuxRelabel: true}}
		},
		"linux.resources.hugepage_limits of 0": func(_ *sandbox.Pod, c *runtimeapi.ContainerConfig) {
			c.Linux.Resources.HugepageLimits = []*runtimeapi.HugepageLimit{{PageSize: "2MB"}}
		},
		"linux.resources.cpu_period without cpu_quota": func(_ *sandbox.Pod, c *runtimeapi.ContainerConfig) {
			c.Linux.Resources.CpuPeriod = 100000
		},
		"linux.resources.oom_score_adj below ours": func(_ *sandbox.Pod, c *runtimeapi.ContainerConfig) {
			c.Linux.Resources.OomScoreAdj = -997
		},
		"linux.security_context.apparmor RuntimeDefault": func(_ *sandbox.Pod, c *runtimeapi.ContainerConfig) {
			c.Linux.SecurityContext.Apparmor = &runtimeapi.SecurityProfile{}
		},
		"linux.security_context.selinux_options of level s0": func(p *sandbox.Pod, c *runtimeapi.ContainerConfig) {
			p.Config.Linux.SecurityContext.SelinuxOptions = &runtimeapi.SELinuxOption{Level: "s0"}
			c.Linux.SecurityContext.SelinuxOptions = &runtimeapi.SELinuxOption{Level: "s0"}
		},
		"linux.security_context.* of a privileged container": func(p *sandbox.Pod, c *runtimeapi.ContainerConfig) {
			p.Config.Linux.SecurityContext.Privileged = true
			c.Linux.SecurityContext = &runtimeapi.LinuxContainerSecurityContext{
				Privileged: true, Seccomp: localhostProfile("x"), Apparmor: localhostProfile("x"),
				SelinuxOptions: &runtimeapi.SELinuxOption{Type: "x"},
				Capabilities:   &runtimeapi.Capability{AddCapabilities: []string{"SYS_ADMIN"}},
			}
		},
		"pod linux.resources, linux.overhead": func(p *sandbox.Pod, _ *runtimeapi.ContainerConfig) {
			p.Config.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 20}
			p.Config.Linux.Overhead = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 20}
		},
		"pod linux.security_context.seccomp, apparmor, user, …": func(p *sandbox.Pod, _ *runtimeapi.ContainerConfig) {
			sc := p.Config.Linux.SecurityContext
			sc.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined}
			sc.RunAsUser, sc.ReadonlyRootfs, sc.SupplementalGroups = int64Value(7), true, []int64{9}
		},
		"annotations, except classes of other runtimes' (BlockIO)": func(p *sandbox.Pod, c *runtimeapi.ContainerConfig) {
			p.Config.Annotations = map[string]string{"a": "b"}
			c.Annotations = map[string]string{"io.kubernetes.container.restartCount": "1"}
		},
	}
	require.Len(t, examples, len(Harmless))
	for row := range Harmless {
		require.Contains(t, examples, row)
		p, c := testPod(), testContainer()
		examples[row](p, c.Config)
		assert.NoError(t, Validate(p, nil, bare), row)
		assert.NoError(t, Validate(p, c, bare), row)
	}
}
