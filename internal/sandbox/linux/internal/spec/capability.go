package spec

import (
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/pkg/cap"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// allCapabilities is how the CRI names all of them at once.
const allCapabilities = "ALL"

// defaultCapabilities are what a container gets that asks for nothing: the set that Docker began with and that
// images have come to expect. The runtimes of the field agree on it.
var defaultCapabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
	"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

// capabilities computes the sets of a container's process. Adding goes before dropping, ALL before single names:
// add ALL, drop ALL, add the named ones, drop the named ones. A name that the host cannot grant is refused, while
// ALL and privileged mean all that it can.
//
// Inheritable stays empty unless ambient capabilities are asked for: a program of an unprivileged user with file
// capabilities would gain them (CVE-2022-24769).
func capabilities(sc *runtimeapi.LinuxContainerSecurityContext, h Host) (*specs.LinuxCapabilities, error) {
	const field = "linux.security_context.capabilities"
	asked := sc.GetCapabilities()
	if sc.GetPrivileged() {
		return capabilitySets(h.Caps, nil), nil
	}
	add, addAll, err := capabilityNames(field+".add_capabilities", asked.GetAddCapabilities(), &h)
	if err != nil {
		return nil, err
	}
	drop, dropAll, err := capabilityNames(field+".drop_capabilities", asked.GetDropCapabilities(), nil)
	if err != nil {
		return nil, err
	}
	ambient, allAmbient, err := capabilityNames(field+".add_ambient_capabilities", asked.GetAddAmbientCapabilities(), &h)
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
	granted = slices.Sorted(slices.Values(granted))
	granted = slices.Compact(granted)
	return &specs.LinuxCapabilities{
		Bounding: granted, Effective: granted, Permitted: granted,
		Inheritable: ambient, Ambient: ambient,
	}
}

// capabilityNames writes names in the kernel's way (CAP_NET_ADMIN) and tells whether ALL is among them.
// With a host, names that it cannot grant are refused.
func capabilityNames(field string, asked []string, grantable *Host) (names []string, all bool, err error) {
	for _, name := range asked {
		full := strings.ToUpper(name)
		if full == allCapabilities {
			all = true
			continue
		}
		if !strings.HasPrefix(full, "CAP_") {
			full = "CAP_" + full
		}
		if !slices.Contains(cap.Known(), full) {
			return nil, false, invalid(field, "%q is no Linux capability", name)
		}
		if grantable != nil && !slices.Contains(grantable.Caps, full) {
			return nil, false, unsupported(field, "%s is not in the node's own bounding set, so it cannot be granted", full)
		}
		names = append(names, full)
	}
	return names, all, nil
}
