package spec

import (
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/pkg/cap"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const allCapabilities = "ALL"

// defaultCapabilities are the capabilities of a container that requests none: Docker's original set, which images
// expect and other runtimes share.
var defaultCapabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
	"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

// capabilities returns the capability sets of a container's process. It applies the parts of the request in this order:
// add ALL, drop ALL, add names, drop names. It rejects a name that the host cannot grant. ALL stands for all
// capabilities that the host can grant; a privileged container gets all of these. The inheritable set is empty unless
// ambient capabilities are requested: otherwise an unprivileged user could gain the inheritable capabilities by running
// a program with file capabilities (CVE-2022-24769).
func capabilities(sc *runtimeapi.LinuxContainerSecurityContext, h Host) (*specs.LinuxCapabilities, error) {
	const field = "linux.security_context.capabilities"
	requested := sc.GetCapabilities()
	if sc.GetPrivileged() {
		return capabilitySets(h.Caps, nil), nil
	}
	add, addAll, err := capabilityNames(field+".add_capabilities", requested.GetAddCapabilities(), &h)
	if err != nil {
		return nil, err
	}
	drop, dropAll, err := capabilityNames(field+".drop_capabilities", requested.GetDropCapabilities(), nil)
	if err != nil {
		return nil, err
	}
	ambient, allAmbient, err := capabilityNames(field+".add_ambient_capabilities", requested.GetAddAmbientCapabilities(), &h)
	if err != nil {
		return nil, err
	}
	if allAmbient {
		ambient = h.Caps
	}
	granted := slices.DeleteFunc(slices.Clone(defaultCapabilities), func(c string) bool { return !slices.Contains(h.Caps, c) })
	if addAll {
		granted = slices.Clone(h.Caps)
	}
	if dropAll {
		granted = nil
	}
	dropped := func(c string) bool { return slices.Contains(drop, c) }
	granted = slices.DeleteFunc(slices.Concat(granted, add, ambient), dropped)
	return capabilitySets(granted, slices.DeleteFunc(slices.Clone(ambient), dropped)), nil
}

func capabilitySets(granted, ambient []string) *specs.LinuxCapabilities {
	granted = slices.Compact(slices.Sorted(slices.Values(granted)))
	return &specs.LinuxCapabilities{
		Bounding: granted, Effective: granted, Permitted: granted,
		Inheritable: ambient, Ambient: ambient,
	}
}

// capabilityNames converts names to the kernel's form (CAP_NET_ADMIN) and reports whether ALL is among them. If a host
// is given, capabilityNames rejects names that the host cannot grant.
func capabilityNames(field string, requested []string, grantable *Host) (names []string, all bool, err error) {
	for _, name := range requested {
		full := strings.ToUpper(name)
		if full == allCapabilities {
			all = true
			continue
		}
		if !strings.HasPrefix(full, "CAP_") {
			full = "CAP_" + full
		}
		if !slices.Contains(cap.Known(), full) {
			return nil, false, invalid(field, "%q is not a Linux capability", name)
		}
		if grantable != nil && !slices.Contains(grantable.Caps, full) {
			return nil, false, unsupported(field, "%s is not in the node's own bounding set, so it cannot be granted", full)
		}
		names = append(names, full)
	}
	return names, all, nil
}
