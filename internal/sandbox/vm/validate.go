package vm

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
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
	"mounts of the termination message":                       "the kubelet's: the end of a machine is told by its status",
	"mounts.selinux_relabel, propagation PRIVATE":             "there is nothing to relabel, and no mount to propagate",
	"namespace_options of pid, ipc: POD, CONTAINER":           "a guest has processes of its own only",
	"pod linux.resources, overhead":                           "sums for information",
	"stop_signal":                                             "a machine is asked to end by its power button",
	"tty":                                                     "the console of a machine is a terminal always",
}

// invalid is the refusal of a field whose value cannot be right.
func invalid(field, format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", field, fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
}

// unsupported is the refusal of a field that is right but that a machine cannot have.
func unsupported(field, format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", field, fmt.Sprintf(format, args...), errdefs.ErrNotImplemented)
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
		func() error { return validateMounts(c.Config.GetMounts()) },
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
	sc := linux.GetSecurityContext()
	switch {
	case config.GetWindows() != nil:
		return invalid("windows", "this is a Linux node")
	case sc.GetPrivileged():
		return unsupported("linux.security_context.privileged", "a machine has nothing of the node that it could be let at")
	case sc.GetReadonlyRootfs():
		return unsupported("linux.security_context.readonly_rootfs", "a machine writes to its root disk, which is a layer on the image's")
	case len(otherSysctls(linux.GetSysctls())) > 0:
		return unsupported("linux.sysctls", "%v: the kernel is the guest's; set them there, by cloud-init for instance", otherSysctls(linux.GetSysctls()))
	}
	if err := validateProfiles(sc.GetSeccomp(), sc.GetApparmor(), sc.GetSelinuxOptions()); err != nil {
		return err
	}
	return validateNamespaces(sc.GetNamespaceOptions())
}

// otherSysctls are those that somebody counts on.
func otherSysctls(sysctls map[string]string) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(sysctls)), func(name string) bool { return name == "net.ipv4.ip_unprivileged_port_start" })
}

func validateContainer(config *runtimeapi.ContainerConfig) error {
	switch {
	case config.GetWindows() != nil:
		return invalid("windows", "this is a Linux node")
	case len(config.GetCommand()) > 0:
		return unsupported("command", "%q: a machine boots what is on its disk; have cloud-init run it (annotation VirtletCloudInitUserData)", config.GetCommand())
	case len(config.GetCDIDevices()) > 0:
		return unsupported("CDI_devices", "a machine can be given block devices only")
	case config.GetWorkingDir() != "" && path.Clean(config.GetWorkingDir()) != "/":
		return unsupported("working_dir", "%q: a machine has no working directory", config.GetWorkingDir())
	}
	for i, arg := range config.GetArgs() {
		if arg == "" || strings.ContainsAny(arg, "\x00\n") {
			return invalid(fmt.Sprintf("args[%d]", i), "%q cannot stand on a kernel's command line", arg)
		}
	}
	for _, e := range config.GetEnvs() {
		if e.GetKey() == "" || strings.ContainsAny(e.GetKey(), "=\x00") || strings.Contains(string(e.GetValue()), "\x00") {
			return invalid("envs", "%q is not the name of a variable, or its value contains a NUL byte", e.GetKey())
		}
	}
	return nil
}

func validateSecurity(sc *runtimeapi.LinuxContainerSecurityContext) error {
	caps := sc.GetCapabilities()
	added := slices.Concat(caps.GetAddCapabilities(), caps.GetAddAmbientCapabilities())
	switch {
	case sc.GetPrivileged():
		return unsupported("linux.security_context.privileged", "a machine has nothing of the node that it could be let at")
	case sc.GetReadonlyRootfs():
		return unsupported("linux.security_context.readonly_rootfs", "a machine writes to its root disk, which is a layer on the image's")
	case len(added) > 0:
		return unsupported("linux.security_context.capabilities", "a machine cannot have %v of the node's; in the guest root has them all", added)
	}
	if err := validateProfiles(sc.GetSeccomp(), sc.GetApparmor(), sc.GetSelinuxOptions()); err != nil {
		return err
	}
	return validateNamespaces(sc.GetNamespaceOptions())
}

// validateProfiles lets pass what is less strict than what the hypervisor process is held to.
func validateProfiles(seccomp, apparmor *runtimeapi.SecurityProfile, selinux *runtimeapi.SELinuxOption) error {
	for field, profile := range map[string]*runtimeapi.SecurityProfile{"seccomp": seccomp, "apparmor": apparmor} {
		if profile.GetProfileType() == runtimeapi.SecurityProfile_Localhost {
			return unsupported("linux.security_context."+field, "what runs in a guest calls the guest's kernel; the profile %q has nothing to apply to", profile.GetLocalhostRef())
		}
	}
	if sandbox.DemandsLabel(selinux) {
		return unsupported("linux.security_context.selinux_options", "the processes of a guest have the guest's labels")
	}
	return nil
}

func validateNamespaces(o *runtimeapi.NamespaceOption) error {
	const field = "linux.security_context.namespace_options."
	switch {
	case o.GetNetwork() == runtimeapi.NamespaceMode_NODE:
		return unsupported(field+"network", "a machine has network cards, which are the pod's; the node's own network cannot be shared with it")
	case o.GetPid() == runtimeapi.NamespaceMode_NODE || o.GetPid() == runtimeapi.NamespaceMode_TARGET:
		return unsupported(field+"pid", "a guest sees its own processes only (%s)", o.GetPid())
	case o.GetIpc() == runtimeapi.NamespaceMode_NODE:
		return unsupported(field+"ipc", "a guest has its own System V IPC only")
	case o.GetUsernsOptions() != nil && o.GetUsernsOptions().GetMode() == runtimeapi.NamespaceMode_POD:
		return unsupported(field+"userns_options", "users in a guest are none of the node's anyway")
	}
	return nil
}

func validateResources(res *runtimeapi.LinuxContainerResources) error {
	const field = "linux.resources."
	switch limit := res.GetMemoryLimitInBytes(); {
	case limit < 0 || limit > 0 && limit < minMemory:
		return invalid(field+"memory_limit_in_bytes", "%d is the guest's whole memory, which cannot be less than %d", limit, minMemory)
	case res.GetCpuQuota() > 0 && res.GetCpuQuota() < 1000:
		return invalid(field+"cpu_quota", "%d µs is less than 1000", res.GetCpuQuota())
	case res.GetCpuPeriod() != 0 && (res.GetCpuPeriod() < 1000 || res.GetCpuPeriod() > 1_000_000):
		return invalid(field+"cpu_period", "%d µs is not between 1000 and 1000000", res.GetCpuPeriod())
	}
	if demanded := sandbox.DemandedUnified(res); demanded != nil {
		return unsupported(field+"unified", "%v: not among what the hypervisor's cgroup is given", demanded)
	}
	return nil
}

func validateMounts(mounts []*runtimeapi.Mount) error {
	seen := map[string]bool{}
	for i, m := range mounts {
		field := fmt.Sprintf("mounts[%d]", i)
		at := path.Clean(m.GetContainerPath())
		switch {
		case !path.IsAbs(m.GetContainerPath()):
			return invalid(field+".container_path", "%q is not absolute", m.GetContainerPath())
		case seen[at]:
			return invalid(field+".container_path", "%q is mounted twice", at)
		case m.GetImage().GetImage() != "":
			return unsupported(field+".image", "a machine cannot have image volumes")
		case m.GetPropagation() != runtimeapi.MountPropagation_PROPAGATION_PRIVATE:
			return unsupported(field+".propagation", "%s: mounts do not cross the border of a guest", m.GetPropagation())
		case len(m.GetUidMappings()) > 0 || len(m.GetGidMappings()) > 0:
			return unsupported(field+".uidMappings", "users in a guest are not mapped")
		case len(m.GetMountOptions()) > 0:
			return unsupported(field+".mount_options", "%v: the guest mounts, with its own options", m.GetMountOptions())
		}
		if err := refuseFlexVolume(field, m); err != nil {
			return err
		}
		seen[at] = true
	}
	return nil
}
