package spec

import (
	"path/filepath"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// Harmless lists fields that are accepted although they have no effect on this host or in this backend. It gives a
// reason for each. Either the kubelet sends these fields with every pod, or the CRI says that they may be ignored. All
// other fields are enforced or rejected.
var Harmless = map[string]string{
	"mounts.selinux_relabel":                                   "there is nothing to relabel without SELinux",
	"linux.resources.hugepage_limits of 0":                     "sent for every page size; without a hugetlb controller there is nothing to limit",
	"linux.resources.cpu_period without cpu_quota":             "has no meaning without a quota",
	"linux.resources.oom_score_adj below ours":                 "raised to ours without CAP_SYS_RESOURCE, which only makes the container a likelier victim",
	"linux.security_context.apparmor RuntimeDefault":           "without AppArmor in the kernel there is no default profile",
	"linux.security_context.selinux_options of level s0":       "the level of every process if no label is applied",
	"linux.security_context.* of a privileged container":       "the CRI says that capabilities, seccomp, AppArmor and SELinux may have no effect",
	"pod linux.resources, linux.overhead":                      "informational sums; the kubelet limits the pod's cgroup itself",
	"pod linux.security_context.seccomp, apparmor, user, …":    "there is no sandbox process to apply them to",
	"annotations, except classes of other runtimes' (BlockIO)": "the CRI says that they do not influence the runtime",
}

// refusedAnnotations are prefixes of annotations with which pods request classes for block I/O or caches. Only other
// runtimes have such classes. Such annotations are rejected, because a pod that sets them relies on the limits.
var refusedAnnotations = []string{"blockio.resources.beta.kubernetes.io/", "rdt.resources.beta.kubernetes.io/"}

// Validate checks the fields of a container, or, if c is nil, the fields of the pod. It returns
// errdefs.ErrInvalidArgument or errdefs.ErrNotImplemented for a field that cannot be honoured. The error names the
// field. Validate has no side effects. Build makes the checks that need the image or the host's files.
func Validate(p *sandbox.Pod, c *sandbox.Container, h Host) error {
	if p == nil || p.Config == nil {
		return invalid("config", "missing")
	}
	if c == nil {
		return validatePod(p, h)
	}
	if c.Config == nil {
		return invalid("config", "missing")
	}
	return validateContainer(p, c.Config, h)
}

func validatePod(p *sandbox.Pod, h Host) error {
	cfg := p.Config
	sc := cfg.GetLinux().GetSecurityContext()
	if cfg.GetWindows() != nil {
		return invalid("windows", "this is a Linux node")
	}
	if sc.GetRunAsGroup() != nil && sc.GetRunAsUser() == nil {
		return invalid("linux.security_context.run_as_group", "needs run_as_user too")
	}
	if err := checkRunAs(sc); err != nil {
		return err
	}
	if parent := cfg.GetLinux().GetCgroupParent(); strings.Contains(parent, "\x00") ||
		parent != "" && !filepath.IsLocal(strings.TrimLeft(parent, "/")) && parent != "/" {
		return invalid("linux.cgroup_parent", "%q is not the path of a cgroup", parent)
	}
	if err := checkPodNamespaces(sc.GetNamespaceOptions(), h); err != nil {
		return err
	}
	path := sc.GetSeccompProfilePath() //nolint:staticcheck // older kubelets send it
	if _, err := checkSeccomp(sc.GetSeccomp(), path, h); err != nil {
		return err
	}
	if _, err := checkAppArmor(sc.GetApparmor(), "", h); err != nil {
		return err
	}
	if err := checkSELinux(sc.GetSelinuxOptions(), h); err != nil {
		return err
	}
	if err := checkAnnotations(cfg.GetAnnotations()); err != nil {
		return err
	}
	_, err := Sysctls(p)
	return err
}

func validateContainer(p *sandbox.Pod, cfg *runtimeapi.ContainerConfig, h Host) error {
	switch {
	case cfg.GetWindows() != nil:
		return invalid("windows", "this is a Linux node")
	case cfg.GetLogPath() != "" && !filepath.IsLocal(cfg.GetLogPath()):
		return invalid("log_path", "%q is not below the pod's log directory", cfg.GetLogPath())
	}
	for _, check := range []func() error{
		func() error { return checkCommand(cfg) },
		func() error { return checkEnvs(cfg) },
		func() error { return checkWorkingDir("working_dir", cfg.GetWorkingDir()) },
		func() error { return checkStopSignal(cfg.GetStopSignal()) },
		func() error { return checkAnnotations(cfg.GetAnnotations()) },
		func() error { return checkMounts(cfg.GetMounts(), p.IDMap(), h) },
		func() error { return checkDevices(cfg.GetDevices()) },
		func() error { return validateSecurity(p, cfg.GetLinux().GetSecurityContext(), h) },
		func() error { _, err := Resources(cfg.GetLinux().GetResources(), h); return err },
	} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func validateSecurity(p *sandbox.Pod, sc *runtimeapi.LinuxContainerSecurityContext, h Host) error {
	if err := checkContainerNamespaces(p, sc.GetNamespaceOptions()); err != nil {
		return err
	}
	if err := checkUser(sc); err != nil {
		return err
	}
	if err := checkMaskedPaths(sc); err != nil {
		return err
	}
	if sc.GetPrivileged() {
		if !p.Config.GetLinux().GetSecurityContext().GetPrivileged() {
			return invalid("linux.security_context.privileged", "the pod's sandbox is not privileged")
		}
		if h.SELinux { // its files have a label although its processes have none
			return checkSELinux(sc.GetSelinuxOptions(), h)
		}
		return nil
	}
	if _, err := capabilities(sc, h); err != nil {
		return err
	}
	path := sc.GetSeccompProfilePath() //nolint:staticcheck // older kubelets send it
	if _, err := checkSeccomp(sc.GetSeccomp(), path, h); err != nil {
		return err
	}
	profile := sc.GetApparmorProfile() //nolint:staticcheck // older kubelets send it
	if _, err := checkAppArmor(sc.GetApparmor(), profile, h); err != nil {
		return err
	}
	return checkSELinux(sc.GetSelinuxOptions(), h)
}

func checkCommand(cfg *runtimeapi.ContainerConfig) error {
	for field, args := range map[string][]string{"command": cfg.GetCommand(), "args": cfg.GetArgs()} {
		for _, arg := range args {
			if err := checkText(field, arg); err != nil {
				return err
			}
		}
	}
	return nil
}

func checkAnnotations(annotations map[string]string) error {
	for key := range annotations {
		for _, prefix := range refusedAnnotations {
			if strings.HasPrefix(key, prefix) {
				return unsupported("annotations", "%s: block I/O and cache classes are not available on this node", key)
			}
		}
	}
	return nil
}
