// Package fields checks the fields of the CRI that mean the same to every kind of pod, and makes the errors by which a backend
// refuses a field. Why a kind cannot have what a field asks for is the kind's to say: Reasons.
//
// It must not check what one kind alone knows. Begin reading with Reasons.
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

// Invalid is the refusal of a field whose value cannot be right.
func Invalid(field, format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", field, fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
}

// Unsupported is the refusal of a field that is right, but that a kind of pod cannot have.
func Unsupported(field, format string, args ...any) error {
	return fmt.Errorf("%s: %s: %w", field, fmt.Sprintf(format, args...), errdefs.ErrNotImplemented)
}

// Reasons are why a kind of pod whose processes are not the node's cannot have what some fields ask for.
type Reasons struct {
	// Profile is for a seccomp or AppArmor profile in a file, Label for SELinux labels.
	Profile, Label string
	// PID, IPC and Users are for the node's, or another container's, PID and IPC namespace and for a user namespace.
	PID, IPC, Users string
	// ImageVolume, Propagation and MountOwners are for mounts of images, with propagation, and with mapped users.
	ImageVolume, Propagation, MountOwners string
}

// Profiles checks the profiles. What is less strict than what the kind holds all its pods to may pass.
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

// Namespaces checks the namespaces, all but the network's.
func (r Reasons) Namespaces(o *runtimeapi.NamespaceOption) error {
	const field = "linux.security_context.namespace_options."
	switch {
	case o.GetPid() == runtimeapi.NamespaceMode_NODE || o.GetPid() == runtimeapi.NamespaceMode_TARGET:
		return Unsupported(field+"pid", "%s (%s)", r.PID, o.GetPid())
	case o.GetIpc() == runtimeapi.NamespaceMode_NODE:
		return Unsupported(field+"ipc", "%s", r.IPC)
	case o.GetUsernsOptions() != nil && o.GetUsernsOptions().GetMode() == runtimeapi.NamespaceMode_POD:
		return Unsupported(field+"userns_options", "%s", r.Users)
	}
	return nil
}

// Mounts checks the mounts. check, unless it is nil, is called for each with its field's name, to refuse what the kind alone cannot
// have.
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
		case len(m.GetUidMappings()) > 0 || len(m.GetGidMappings()) > 0:
			return Unsupported(field+".uidMappings", "%s", r.MountOwners)
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

// DemandedSysctls are the names of those that somebody counts on, in order: a kubelet asks by itself for ports below 1024 to be open.
func DemandedSysctls(sysctls map[string]string) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(sysctls)), func(name string) bool { return name == "net.ipv4.ip_unprivileged_port_start" })
}

// Env checks the environment.
func Env(envs []*runtimeapi.KeyValue) error {
	for _, e := range envs {
		if e.GetKey() == "" || strings.ContainsAny(e.GetKey(), "=\x00") || strings.Contains(string(e.GetValue()), "\x00") {
			return Invalid("envs", "%q is not the name of a variable, or its value contains a NUL byte", e.GetKey())
		}
	}
	return nil
}

// CPU checks the quota and its period.
func CPU(res *runtimeapi.LinuxContainerResources) error {
	switch {
	case res.GetCpuQuota() > 0 && res.GetCpuQuota() < 1000:
		return Invalid("linux.resources.cpu_quota", "%d µs is less than 1000", res.GetCpuQuota())
	case res.GetCpuPeriod() != 0 && (res.GetCpuPeriod() < 1000 || res.GetCpuPeriod() > 1_000_000):
		return Invalid("linux.resources.cpu_period", "%d µs is not between 1000 and 1000000", res.GetCpuPeriod())
	}
	return nil
}
