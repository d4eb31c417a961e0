package spec

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/contrib/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/apparmor"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/selinux"
)

// maxProfile limits the size of a seccomp profile on the node, in bytes. Common profiles have about 10 kB.
const maxProfile = 4 << 20

// The paths of /proc and /sys that are hidden or read-only by default, because they reveal or change the node. Other
// runtimes use the same lists.
var (
	defaultMaskedPaths = []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
		"/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats", "/sys/devices/virtual/powercap",
		"/sys/firmware",
	}
	defaultReadonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

// Values of the CRI's deprecated string fields (seccomp_profile_path, apparmor_profile).
const (
	profileDefault    = "runtime/default"
	profileDocker     = "docker/default"
	profileUnconfined = "unconfined"
	profileLocalhost  = "localhost/"
)

// profile returns the effective security profile: the given message if it is not nil, otherwise the profile that the
// deprecated string names. If both are missing, the profile is Unconfined.
func profile(field string, p *runtimeapi.SecurityProfile, deprecated string) (*runtimeapi.SecurityProfile, error) {
	if p != nil {
		if _, ok := runtimeapi.SecurityProfile_ProfileType_name[int32(p.GetProfileType())]; !ok {
			return nil, invalid(field, "unknown profile type %d", p.GetProfileType())
		}
		if p.GetLocalhostRef() != "" && p.GetProfileType() != runtimeapi.SecurityProfile_Localhost {
			return nil, invalid(field, "localhost_ref needs the profile type Localhost")
		}
		return p, nil
	}
	if ref, ok := strings.CutPrefix(deprecated, profileLocalhost); ok {
		return &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Localhost, LocalhostRef: ref}, nil
	}
	switch deprecated {
	case "", profileUnconfined:
		return &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined}, nil
	case profileDefault, profileDocker:
		return &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}, nil
	}
	return nil, invalid(field, "profile %q is not %s, %s or %sNAME", deprecated, profileDefault, profileUnconfined, profileLocalhost)
}

// checkSeccomp checks the form of a seccomp request and whether the host supports filters. It returns the effective
// profile.
func checkSeccomp(p *runtimeapi.SecurityProfile, deprecated string, h Host) (*runtimeapi.SecurityProfile, error) {
	const field = "linux.security_context.seccomp"
	p, err := profile(field, p, deprecated)
	if err != nil {
		return nil, err
	}
	if p.GetProfileType() != runtimeapi.SecurityProfile_Unconfined && !h.Seccomp {
		return nil, unsupported(field, "the kernel of this node has no seccomp (CONFIG_SECCOMP)")
	}
	if p.GetProfileType() == runtimeapi.SecurityProfile_Localhost && !path.IsAbs(p.GetLocalhostRef()) {
		return nil, invalid(field, "localhost_ref %q is not an absolute path", p.GetLocalhostRef())
	}
	return p, checkText(field, p.GetLocalhostRef())
}

// systemCallFilter returns the container's seccomp filter, or nil for an unconfined container. The specification must
// already contain the process's capabilities, because the default profile depends on them.
func systemCallFilter(sc *runtimeapi.LinuxContainerSecurityContext, s *specs.Spec, h Host) (*specs.LinuxSeccomp, error) {
	if sc.GetPrivileged() {
		return nil, nil
	}
	p, err := checkSeccomp(sc.GetSeccomp(), sc.GetSeccompProfilePath(), h) //nolint:staticcheck // older kubelets send the path
	if err != nil {
		return nil, err
	}
	switch p.GetProfileType() {
	case runtimeapi.SecurityProfile_RuntimeDefault:
		return seccomp.DefaultProfile(s), nil
	case runtimeapi.SecurityProfile_Localhost:
		return readProfile(p.GetLocalhostRef())
	}
	return nil, nil
}

// readProfile reads a seccomp profile on the node: a LinuxSeccomp of the runtime-spec, in JSON.
func readProfile(name string) (*specs.LinuxSeccomp, error) {
	const field = "linux.security_context.seccomp"
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, invalid(field, "profile %s does not exist on this node", name)
	}
	if err != nil {
		return nil, classifyFileError(field, err)
	}
	defer f.Close()
	text, err := readRegular(f, name, maxProfile)
	if err != nil {
		return nil, classifyFileError(field, err)
	}
	var filter specs.LinuxSeccomp
	if err := json.Unmarshal(text, &filter); err != nil {
		return nil, invalid(field, "%s is not a seccomp profile: %v", name, err)
	}
	if filter.DefaultAction == "" {
		return nil, invalid(field, "%s is not a seccomp profile: it has no defaultAction", name)
	}
	return &filter, nil
}

// checkAppArmor returns the AppArmor profile to apply, or "" if none applies. A container that asks for nothing gets the
// default profile, if there is one. A localhost profile must be loaded on the node.
func checkAppArmor(p *runtimeapi.SecurityProfile, deprecated string, h Host) (string, error) {
	const field = "linux.security_context.apparmor"
	if p == nil && deprecated == "" {
		return h.AppArmorProfile, nil
	}
	p, err := profile(field, p, deprecated)
	if err != nil {
		return "", err
	}
	// critest and older clients write the prefix of the deprecated string here, too.
	name := strings.TrimPrefix(p.GetLocalhostRef(), profileLocalhost)
	switch kind := p.GetProfileType(); {
	case kind == runtimeapi.SecurityProfile_Localhost && name == "":
		return "", invalid(field, "localhost_ref must name a profile")
	case kind == runtimeapi.SecurityProfile_Localhost && !h.AppArmor:
		return "", unsupported(field, "profile %q: AppArmor is not enabled on this node", name)
	case !h.AppArmor:
		return "", nil
	case kind == runtimeapi.SecurityProfile_Unconfined:
		return profileUnconfined, nil
	case kind == runtimeapi.SecurityProfile_RuntimeDefault && h.AppArmorProfile == "":
		return "", unsupported(field, "the default profile could not be loaded on this node (see `tripod check`)")
	case kind == runtimeapi.SecurityProfile_RuntimeDefault:
		return h.AppArmorProfile, nil
	}
	loaded, err := apparmor.Loaded(h.root, name)
	if err != nil {
		return "", invalid(field, "profile %q: %v", name, err)
	}
	if !loaded {
		return "", invalid(field, "profile %q is not loaded on this node", name)
	}
	return name, nil
}

var (
	// labelName matches users, roles and types of a policy.
	labelName = lazyregexp.New(`^[A-Za-z0-9_.-]*$`)
	// labelLevel matches a level or a range of levels, such as s0, s0:c1,c7 and s0-s3:c0.c1023.
	labelLevel = lazyregexp.New(`^(` + oneLevel + `(-` + oneLevel + `)?)?$`)
)

const oneLevel = `s[0-9]{1,2}(:c[0-9]{1,4}([.,]c[0-9]{1,4})*)?`

// checkSELinux checks the form of the options. Whether the policy allows them is known once the label is complete; see
// selinux.Pool.
func checkSELinux(o *runtimeapi.SELinuxOption, h Host) error {
	const field = "linux.security_context.selinux_options"
	if !h.SELinux {
		if sandbox.DemandsLabel(o) {
			return unsupported(field, "SELinux labels are not available on this node (see `tripod check`)")
		}
		return nil
	}
	for name, value := range map[string]string{"user": o.GetUser(), "role": o.GetRole(), "type": o.GetType()} {
		if !labelName().MatchString(value) {
			return invalid(field+"."+name, "%q is not a name of an SELinux policy", value)
		}
	}
	if !labelLevel().MatchString(o.GetLevel()) {
		return invalid(field+".level", "%q is not a level such as s0:c1,c2", o.GetLevel())
	}
	return nil
}

// applyLabels adds labels to a specification. The OCI runtime also applies them to the mounts that it makes, and to the
// session keyring. A privileged process has no label of its own: the policy gives it an unconfined type.
func applyLabels(s *specs.Spec, l selinux.Labels, privileged bool) {
	s.Linux.MountLabel = l.Mount
	if !privileged {
		s.Process.SelinuxLabel = l.Process
	}
}

// maskedPaths returns the hidden and the read-only paths of /proc and /sys. The CRI cannot distinguish an empty list from
// a missing one. A kubelet sends both lists with every container, and leaves them empty only for procMount: Unmasked.
// For other clients, an empty list means the default list. A privileged container has no hidden or read-only paths.
func maskedPaths(c *runtimeapi.ContainerConfig) (masked, readonly []string) {
	sc := c.GetLinux().GetSecurityContext()
	if sc.GetPrivileged() {
		return nil, nil
	}
	masked, readonly = sc.GetMaskedPaths(), sc.GetReadonlyPaths()
	if sandbox.FromKubelet(c) {
		return slices.Clone(masked), slices.Clone(readonly)
	}
	if len(masked) == 0 {
		masked = defaultMaskedPaths
	}
	if len(readonly) == 0 {
		readonly = defaultReadonlyPaths
	}
	return slices.Clone(masked), slices.Clone(readonly)
}

func checkMaskedPaths(sc *runtimeapi.LinuxContainerSecurityContext) error {
	for field, paths := range map[string][]string{"masked_paths": sc.GetMaskedPaths(), "readonly_paths": sc.GetReadonlyPaths()} {
		for _, p := range paths {
			if !path.IsAbs(p) {
				return invalid("linux.security_context."+field, "%q is not absolute", p)
			}
			if err := checkText("linux.security_context."+field, p); err != nil {
				return err
			}
		}
	}
	return nil
}
