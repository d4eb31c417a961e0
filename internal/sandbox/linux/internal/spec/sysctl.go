package spec

import (
	"maps"
	"slices"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// sysctlSegment matches one component of a name below /proc/sys. The set of characters is large because a component can
// be the name of a network interface.
var sysctlSegment = lazyregexp.New(`^[A-Za-z0-9_][A-Za-z0-9_.:@-]*$`)

// Sysctls returns the kernel parameters to set for the pod, keyed by their path below /proc/sys (net/ipv4/ip_forward).
// The keys are safe to join to that path. Sysctls allows only parameters of the pod's own namespaces: IPC parameters if
// the pod has its own IPC namespace, and net.* if it has its own network namespace. All others would change the node
// (see CVE-2022-0811), so Sysctls rejects them with errdefs.ErrInvalidArgument.
func Sysctls(p *sandbox.Pod) (map[string]string, error) {
	const field = "linux.sysctls"
	requested := p.Config.GetLinux().GetSysctls()
	ns := p.Config.GetLinux().GetSecurityContext().GetNamespaceOptions()
	result := make(map[string]string, len(requested))
	for name, value := range requested {
		segments := sysctlSegments(name)
		for _, s := range segments {
			if !sysctlSegment().MatchString(s) {
				return nil, invalid(field, "%q is not the name of a kernel parameter", name)
			}
		}
		switch {
		case len(segments) < 2, !namespacedNet(segments) && !namespacedIPC(segments):
			return nil, invalid(field, "%q is not on the list of namespaced parameters (kernel.shm*, kernel.msg*, kernel.sem, fs.mqueue.*, net.*)",
				name)
		case namespacedNet(segments) && ns.GetNetwork() == runtimeapi.NamespaceMode_NODE:
			return nil, invalid(field, "%q would change the node: the pod is on the host network", name)
		case namespacedIPC(segments) && ns.GetIpc() == runtimeapi.NamespaceMode_NODE:
			return nil, invalid(field, "%q would change the node: the pod uses the host's IPC namespace", name)
		case strings.ContainsAny(value, "\x00\n"):
			return nil, invalid(field, "the value of %q contains a NUL or a newline", name)
		}
		key := strings.Join(segments, "/")
		if _, twice := result[key]; twice {
			return nil, invalid(field, "%q is set twice, with dots and with slashes", name)
		}
		result[key] = value
	}
	return result, nil
}

// ownNetDefaults allow programs that do not run as root to ping and to listen on any port. This is safe in the pod's
// own network namespace.
var ownNetDefaults = map[string]string{
	"net/ipv4/ip_unprivileged_port_start": "0",
	"net/ipv4/ping_group_range":           "0 2147483647",
}

// DefaultSysctls returns the pod's default kernel parameters, keyed as in Sysctls, without the requested ones. The
// kernel may lack some of these parameters.
func DefaultSysctls(p *sandbox.Pod, requested map[string]string) map[string]string {
	if PodModes(p).Network == runtimeapi.NamespaceMode_NODE {
		return nil
	}
	result := maps.Clone(ownNetDefaults)
	maps.DeleteFunc(result, func(key, _ string) bool { _, set := requested[key]; return set })
	return result
}

// sysctlSegments splits a name as sysctl(8) does: the first dot or slash is the separator, and the other character
// stands for a dot within a component (net.ipv4.conf.eth0/1.forwarding, net/ipv4/conf/eth0.1/forwarding).
func sysctlSegments(name string) []string {
	i := strings.IndexAny(name, "./")
	if i >= 0 && name[i] == '/' {
		return strings.Split(name, "/")
	}
	segments := strings.Split(name, ".")
	for i, s := range segments {
		segments[i] = strings.ReplaceAll(s, "/", ".")
	}
	return segments
}

func namespacedNet(segments []string) bool { return segments[0] == "net" }

func namespacedIPC(segments []string) bool {
	switch {
	case slices.Equal(segments, []string{"kernel", "sem"}):
		return true
	case len(segments) == 2 && segments[0] == "kernel":
		return strings.HasPrefix(segments[1], "shm") || strings.HasPrefix(segments[1], "msg")
	}
	return len(segments) == 3 && segments[0] == "fs" && segments[1] == "mqueue"
}
