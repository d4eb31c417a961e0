// Package fields checks the CRI fields that mean the same for every kind of pod, and builds the errors that refuse a
// field. Each kind supplies its own reasons (Reasons).
//
// Checks that concern only one kind do not belong here. Begin reading with Reasons.
package fields

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// Invalid returns an errdefs.ErrInvalidArgument for a field whose value is wrong for every kind of pod.
func Invalid(field, format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", field, fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
}

// Unsupported returns an errdefs.ErrNotImplemented for a field whose value is valid, but not supported by this kind.
func Unsupported(field, format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", field, fmt.Sprintf(format, args...), errdefs.ErrNotImplemented)
}

// Reasons says why a kind refuses certain fields. It is for kinds whose programs are not processes on the node.
type Reasons struct {
	// Profile is the reason for refusing Localhost profiles of seccomp and AppArmor, and Label the reason for refusing
	// SELinux labels.
	Profile, Label string
	// PID is the reason for refusing to share the PID namespace of the node or of another container. IPC is the reason
	// for refusing to share the node's IPC namespace.
	PID, IPC string
	// ImageVolume is the reason for refusing mounts of images, and Propagation the reason for refusing mount propagation.
	ImageVolume, Propagation string
}

// Profiles checks the security profiles. It accepts all profiles that are no stricter than the pods' own isolation.
func (r Reasons) Profiles(seccomp, apparmor *runtimeapi.SecurityProfile, selinux *runtimeapi.SELinuxOption) error {
	for field, profile := range map[string]*runtimeapi.SecurityProfile{"seccomp": seccomp, "apparmor": apparmor} {
		if profile.GetProfileType() == runtimeapi.SecurityProfile_Localhost {
			return Unsupported("linux.security_context."+field, "%s; the profile %q has nothing to apply to", r.Profile, profile.GetLocalhostRef())
		}
	}
	if sandbox.DemandsLabel(selinux) {
		return Unsupported("linux.security_context.selinux_options", "%s", r.Label)
	}
	return nil
}

// Namespaces checks the namespace options, except for the network namespace. It accepts user namespaces: no user of the
// pod is one of the node's, so there is nothing to map.
func (r Reasons) Namespaces(o *runtimeapi.NamespaceOption) error {
	const field = "linux.security_context.namespace_options."
	switch {
	case o.GetPid() == runtimeapi.NamespaceMode_NODE || o.GetPid() == runtimeapi.NamespaceMode_TARGET:
		return Unsupported(field+"pid", "%s (%s)", r.PID, o.GetPid())
	case o.GetIpc() == runtimeapi.NamespaceMode_NODE:
		return Unsupported(field+"ipc", "%s", r.IPC)
	}
	return nil
}

// Mounts checks the mounts. If check is not nil, Mounts also calls check with each mount and the name of the mount's
// field.
func (r Reasons) Mounts(mounts []*runtimeapi.Mount, check func(field string, m *runtimeapi.Mount) error) error {
	seen := map[string]bool{}
	for i, m := range mounts {
		field := fmt.Sprintf("mounts[%d]", i)
		at := path.Clean(m.GetContainerPath())
		switch {
		case !path.IsAbs(m.GetContainerPath()):
			return Invalid(field+".container_path", "%q is not absolute", m.GetContainerPath())
		case seen[at]:
			return Invalid(field+".container_path", "%q is mounted twice", at)
		case m.GetImage().GetImage() != "":
			return Unsupported(field+".image", "%s", r.ImageVolume)
		case m.GetPropagation() != runtimeapi.MountPropagation_PROPAGATION_PRIVATE:
			return Unsupported(field+".propagation", "%s: %s", m.GetPropagation(), r.Propagation)
		}
		if check != nil {
			if err := check(field, m); err != nil {
				return err
			}
		}
		seen[at] = true
	}
	return nil
}

// DemandedSysctls returns a sorted list of the sysctls that the pod's author must have asked for. It leaves out the one
// sysctl that a kubelet sets on its own, to open ports below 1024 to all users.
func DemandedSysctls(sysctls map[string]string) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(sysctls)),
		func(name string) bool { return name == "net.ipv4.ip_unprivileged_port_start" })
}

// Env checks the environment variables.
func Env(envs []*runtimeapi.KeyValue) error {
	for _, e := range envs {
		if e.GetKey() == "" || strings.ContainsAny(e.GetKey(), "=\x00") || strings.Contains(string(e.GetValue()), "\x00") {
			return Invalid("envs", "%q is not the name of a variable, or its value contains a NUL byte", e.GetKey())
		}
	}
	return nil
}

// CPU checks the CPU quota and the CPU period.
func CPU(res *runtimeapi.LinuxContainerResources) error {
	switch {
	case res.GetCpuQuota() > 0 && res.GetCpuQuota() < 1000:
		return Invalid("linux.resources.cpu_quota", "%d µs is less than 1000", res.GetCpuQuota())
	case res.GetCpuPeriod() != 0 && (res.GetCpuPeriod() < 1000 || res.GetCpuPeriod() > 1_000_000):
		return Invalid("linux.resources.cpu_period", "%d µs is not between 1000 and 1000000", res.GetCpuPeriod())
	}
	return nil
}
