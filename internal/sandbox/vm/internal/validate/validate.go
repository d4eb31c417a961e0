package validate

import (
	"fmt"
	"path"
	"slices"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/fields"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/volumes"
	"github.com/tripod-run/tripod/internal/stream"
)

// Harmless lists the fields that are accepted although they have no effect, each with the reason. Either the kubelet
// sends such a field with every pod, or machines are more strictly isolated anyway. Every other field is enforced or
// refused.
var Harmless = map[string]string{
	"linux.resources.cpu_period without cpu_quota":            "has no effect without a quota",
	"linux.resources.hugepage_limits":                         "the guest's memory does not use huge pages",
	"linux.resources.memory_swap_limit_in_bytes":              "the guest always has its whole memory, swapped out or not",
	"linux.resources.oom_score_adj":                           "the hypervisor process is limited by its cgroup, which has room for the guest's whole memory",
	"linux.resources.unified memory.oom.group":                "a machine always ends as a whole",
	"linux.resources.unified memory.high, low, min, swap.max": "a kubelet on cgroup v2 sets them for every container. They throttle or protect a part of a guest's memory, and a throttled guest would stand still",
	"linux.security_context.capabilities.drop":                "the hypervisor process has no capabilities; the guest's are the guest's own",
	"linux.security_context.masked_paths, readonly_paths":     "a guest does not see the node's /proc",
	"linux.security_context.namespace_options.userns_options": "users in the guest are never users of the node, so there is nothing to map: neither here nor in the mappings of mounts",
	"linux.security_context.no_new_privs":                     "always set for the hypervisor process; the guest's processes are the guest's own",
	"linux.security_context.run_as_user, groups, fsGroup":     "users in the guest are the guest's own; each hypervisor process has its own user on the node",
	"linux.security_context.selinux_options of level s0":      "every process has this level if no label is applied",
	"linux.security_context.seccomp, apparmor, not a file":    "the hypervisor process has QEMU's own filter",
	"linux.sysctls net.ipv4.ip_unprivileged_port_start":       "ports in the guest are the guest's own",
	"mounts of the termination message":                       "made by the kubelet; a machine's status reports how it ended",
	"mounts.selinux_relabel, propagation PRIVATE":             "there is nothing to relabel and no mount to propagate",
	"namespace_options of pid, ipc: POD, CONTAINER":           "a guest has only its own processes",
	"pod linux.resources except memory_limit, cpu_quota":      "the kubelet limits the pod's cgroup; they are recorded and reported",
	"pod linux.overhead":                                      "recorded and reported; `vm.memory_overhead` is in force",
	"stop_signal":                                             "a machine is asked to end with its power button",
	"tty":                                                     "a machine's console is always a terminal",
}

// minMemory is the minimum memory of a guest in bytes. With that much, a kernel can at least report that it needs more.
const minMemory = 16 << 20

// reasons says why machines do not support certain fields.
var reasons = fields.Reasons{
	Profile:     "programs in a guest call the guest's kernel",
	Label:       "processes in a guest have the guest's labels",
	PID:         "a guest sees only its own processes",
	IPC:         "a guest has only its own System V IPC",
	ImageVolume: "a machine cannot have image volumes",
	Propagation: "mounts do not propagate into or out of a guest",
}

// Pod returns an error if a machine cannot have a field of its pod.
func Pod(config *runtimeapi.PodSandboxConfig) error {
	linux := config.GetLinux()
	sc, demanded := linux.GetSecurityContext(), fields.DemandedSysctls(linux.GetSysctls())
	switch {
	case config.GetWindows() != nil:
		return fields.Invalid("windows", "this is a Linux node")
	case sc.GetPrivileged():
		return fields.Unsupported("linux.security_context.privileged", "a machine cannot access the node")
	case sc.GetReadonlyRootfs():
		return fields.Unsupported("linux.security_context.readonly_rootfs",
			"a machine always writes to its root disk, an overlay on the image's disk")
	case len(demanded) > 0:
		return fields.Unsupported("linux.sysctls", "%v: a guest has its own kernel; set them in the guest, for instance by cloud-init", demanded)
	}
	if err := reasons.Profiles(sc.GetSeccomp(), sc.GetApparmor(), sc.GetSelinuxOptions()); err != nil {
		return err
	}
	return namespaces(sc.GetNamespaceOptions())
}

// Container returns an error if a machine cannot have a field of its container.
func Container(p *sandbox.Pod, c *sandbox.Container) error {
	for _, check := range []func() error{
		func() error { return container(c.Config) },
		func() error { return security(c.Config.GetLinux().GetSecurityContext()) },
		func() error { return Resources(sandbox.Resources(p, c)) },
		func() error { return reasons.Mounts(c.Config.GetMounts(), mount) },
		func() error { _, err := stream.LogPath(p.Config.GetLogDirectory(), c.Config.GetLogPath()); return err },
	} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func container(config *runtimeapi.ContainerConfig) error {
	switch {
	case config.GetWindows() != nil:
		return fields.Invalid("windows", "this is a Linux node")
	case len(config.GetCommand()) > 0:
		return fields.Unsupported("command",
			"%q: a machine boots the system on its disk; have cloud-init run the command (annotation VirtletCloudInitUserData)", config.GetCommand())
	case config.GetWorkingDir() != "" && path.Clean(config.GetWorkingDir()) != "/":
		return fields.Unsupported("working_dir", "%q: a machine has no working directory", config.GetWorkingDir())
	}
	for i, arg := range config.GetArgs() {
		if arg == "" || strings.ContainsAny(arg, "\x00\n") {
			return fields.Invalid(fmt.Sprintf("args[%d]", i), "%q cannot be part of a kernel command line", arg)
		}
	}
	return fields.Env(config.GetEnvs())
}

func security(sc *runtimeapi.LinuxContainerSecurityContext) error {
	caps := sc.GetCapabilities()
	added := slices.Concat(caps.GetAddCapabilities(), caps.GetAddAmbientCapabilities())
	switch {
	case sc.GetPrivileged():
		return fields.Unsupported("linux.security_context.privileged", "a machine cannot access the node")
	case sc.GetReadonlyRootfs():
		return fields.Unsupported("linux.security_context.readonly_rootfs",
			"a machine always writes to its root disk, an overlay on the image's disk")
	case len(added) > 0:
		return fields.Unsupported("linux.security_context.capabilities",
			"a machine cannot have the node's %v; root has all capabilities in the guest", added)
	}
	if err := reasons.Profiles(sc.GetSeccomp(), sc.GetApparmor(), sc.GetSelinuxOptions()); err != nil {
		return err
	}
	return namespaces(sc.GetNamespaceOptions())
}

func namespaces(o *runtimeapi.NamespaceOption) error {
	if o.GetNetwork() == runtimeapi.NamespaceMode_NODE {
		return fields.Unsupported("linux.security_context.namespace_options.network",
			"a machine is connected to the pod's network and cannot share the node's")
	}
	return reasons.Namespaces(o)
}

// Resources returns an error if a machine cannot have the resources.
func Resources(res *runtimeapi.LinuxContainerResources) error {
	if limit := res.GetMemoryLimitInBytes(); limit < 0 || limit > 0 && limit < minMemory {
		return fields.Invalid("linux.resources.memory_limit_in_bytes", "%d is the guest's whole memory, which must be at least %d", limit,
			minMemory)
	}
	if demanded := sandbox.DemandedUnified(res); demanded != nil {
		return fields.Unsupported("linux.resources.unified", "%v: not supported for the hypervisor's cgroup", demanded)
	}
	return fields.CPU(res)
}

func mount(field string, m *runtimeapi.Mount) error {
	if len(m.GetMountOptions()) > 0 {
		return fields.Unsupported(field+".mount_options", "%v: the guest mounts volumes with its own options", m.GetMountOptions())
	}
	return volumes.RefuseFlexVolume(field, m)
}
