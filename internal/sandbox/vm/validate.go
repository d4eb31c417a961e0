package vm

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/fields"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/stream"
)

// Harmless lists what is accepted although nothing is done about it: what the kubelet sends with every pod, and what a
// machine is held to more strictly than asked. Everything else is enforced or refused.
var Harmless = map[string]string{
	"linux.resources.cpu_period without cpu_quota":            "says nothing without a quota",
	"linux.resources.hugepage_limits":                         "the guest's memory is not made of huge pages",
	"linux.resources.memory_swap_limit_in_bytes":              "the guest's memory is what it is, swapped out or not",
	"linux.resources.oom_score_adj":                           "the hypervisor process is bounded by its cgroup, which has room for the guest's whole memory",
	"linux.resources.unified memory.oom.group":                "a machine ends as a whole anyway",
	"linux.resources.unified memory.high, low, min, swap.max": "a kubelet on cgroup v2 writes them for every container. A guest has its memory as a whole: throttled at a part of it, it would stand still",
	"linux.security_context.capabilities.drop":                "the hypervisor process has none to drop; the guest's are the guest's own",
	"linux.security_context.masked_paths, readonly_paths":     "there is no /proc of the node in a guest",
	"linux.security_context.no_new_privs":                     "always so for the hypervisor process; the guest's processes are the guest's own",
	"linux.security_context.run_as_user, groups, fsGroup":     "users in the guest are the guest's own; the hypervisor process has one that no other pod has",
	"linux.security_context.selinux_options of level s0":      "the level that every process has where no label is applied",
	"linux.security_context.seccomp, apparmor, not a file":    "the hypervisor process has QEMU's own filter",
	"linux.sysctls net.ipv4.ip_unprivileged_port_start":       "ports in the guest are the guest's own",
	"mounts of the termination message":                       "the kubelet's: a machine reports its end by its status",
	"mounts.selinux_relabel, propagation PRIVATE":             "there is nothing to relabel, and no mount to propagate",
	"namespace_options of pid, ipc: POD, CONTAINER":           "a guest has processes of its own only",
	"pod linux.resources, overhead":                           "sums for information",
	"stop_signal":                                             "a machine is asked to end by its power button",
	"tty":                                                     "the console of a machine is a terminal always",
}

// reasons are why a machine cannot have what some fields ask for.
var reasons = fields.Reasons{
	Profile:     "what runs in a guest calls the guest's kernel",
	Label:       "the processes of a guest have the guest's labels",
	PID:         "a guest sees its own processes only",
	IPC:         "a guest has its own System V IPC only",
	Users:       "users in a guest are none of the node's anyway",
	ImageVolume: "a machine cannot have image volumes",
	Propagation: "mounts do not cross the border of a guest",
	MountOwners: "users in a guest are not mapped",
}

// Validate implements sandbox.Backend.
func (b *Backend) Validate(p *sandbox.Pod, c *sandbox.Container) error {
	if !hexID.MatchString(p.ID) {
		return fmt.Errorf("pod ID %q is not 64 lower-case hex digits: %w", p.ID, errdefs.ErrInvalidArgument)
	}
	if _, _, err := annotations.Parse(p.Config.GetAnnotations()); err != nil {
		return err
	}
	if c == nil {
		return validatePod(p.Config)
	}
	for _, check := range []func() error{
		func() error { return validateContainer(c.Config) },
		func() error { return validateSecurity(c.Config.GetLinux().GetSecurityContext()) },
		func() error { return validateResources(c.Config.GetLinux().GetResources()) },
		func() error { return reasons.Mounts(c.Config.GetMounts(), validateMount) },
		func() error { _, err := stream.LogPath(p.Config.GetLogDirectory(), c.Config.GetLogPath()); return err },
	} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func validatePod(config *runtimeapi.PodSandboxConfig) error {
	linux := config.GetLinux()
	sc, demanded := linux.GetSecurityContext(), fields.DemandedSysctls(linux.GetSysctls())
	switch {
	case config.GetWindows() != nil:
		return fields.Invalid("windows", "this is a Linux node")
	case sc.GetPrivileged():
		return fields.Unsupported("linux.security_context.privileged", "a machine has nothing of the node that it could be let at")
	case sc.GetReadonlyRootfs():
		return fields.Unsupported("linux.security_context.readonly_rootfs", "a machine writes to its root disk, which is a layer on the image's")
	case len(demanded) > 0:
		return fields.Unsupported("linux.sysctls", "%v: the kernel is the guest's; set them there, by cloud-init for instance", demanded)
	}
	if err := reasons.Profiles(sc.GetSeccomp(), sc.GetApparmor(), sc.GetSelinuxOptions()); err != nil {
		return err
	}
	return validateNamespaces(sc.GetNamespaceOptions())
}

func validateContainer(config *runtimeapi.ContainerConfig) error {
	switch {
	case config.GetWindows() != nil:
		return fields.Invalid("windows", "this is a Linux node")
	case len(config.GetCommand()) > 0:
		return fields.Unsupported("command", "%q: a machine boots what is on its disk; have cloud-init run it (annotation VirtletCloudInitUserData)", config.GetCommand())
	case len(config.GetCDIDevices()) > 0:
		return fields.Unsupported("CDI_devices", "a machine can be given block devices only")
	case config.GetWorkingDir() != "" && path.Clean(config.GetWorkingDir()) != "/":
		return fields.Unsupported("working_dir", "%q: a machine has no working directory", config.GetWorkingDir())
	}
	for i, arg := range config.GetArgs() {
		if arg == "" || strings.ContainsAny(arg, "\x00\n") {
			return fields.Invalid(fmt.Sprintf("args[%d]", i), "%q cannot stand on a kernel's command line", arg)
		}
	}
	return fields.Env(config.GetEnvs())
}

func validateSecurity(sc *runtimeapi.LinuxContainerSecurityContext) error {
	caps := sc.GetCapabilities()
	added := slices.Concat(caps.GetAddCapabilities(), caps.GetAddAmbientCapabilities())
	switch {
	case sc.GetPrivileged():
		return fields.Unsupported("linux.security_context.privileged", "a machine has nothing of the node that it could be let at")
	case sc.GetReadonlyRootfs():
		return fields.Unsupported("linux.security_context.readonly_rootfs", "a machine writes to its root disk, which is a layer on the image's")
	case len(added) > 0:
		return fields.Unsupported("linux.security_context.capabilities", "a machine cannot have %v of the node's; in the guest root has them all", added)
	}
	if err := reasons.Profiles(sc.GetSeccomp(), sc.GetApparmor(), sc.GetSelinuxOptions()); err != nil {
		return err
	}
	return validateNamespaces(sc.GetNamespaceOptions())
}

func validateNamespaces(o *runtimeapi.NamespaceOption) error {
	if o.GetNetwork() == runtimeapi.NamespaceMode_NODE {
		return fields.Unsupported("linux.security_context.namespace_options.network", "a machine has network cards, which are the pod's; the node's own network cannot be shared with it")
	}
	return reasons.Namespaces(o)
}

func validateResources(res *runtimeapi.LinuxContainerResources) error {
	if limit := res.GetMemoryLimitInBytes(); limit < 0 || limit > 0 && limit < minMemory {
		return fields.Invalid("linux.resources.memory_limit_in_bytes", "%d is the guest's whole memory, which cannot be less than %d", limit, minMemory)
	}
	if demanded := sandbox.DemandedUnified(res); demanded != nil {
		return fields.Unsupported("linux.resources.unified", "%v: not among what the hypervisor's cgroup is given", demanded)
	}
	return fields.CPU(res)
}

func validateMount(field string, m *runtimeapi.Mount) error {
	if len(m.GetMountOptions()) > 0 {
		return fields.Unsupported(field+".mount_options", "%v: the guest mounts, with its own options", m.GetMountOptions())
	}
	return refuseFlexVolume(field, m)
}
