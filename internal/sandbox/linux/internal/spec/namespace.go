package spec

import (
	"fmt"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// Modes says whose namespaces a container lives in: the pod's (POD), its own (CONTAINER), the node's (NODE) or
// those of another container (TARGET, PID only).
type Modes struct {
	Network, PID, IPC runtimeapi.NamespaceMode
	// Target is the ID of the container whose PID namespace is joined, with TARGET.
	Target string
}

// UTS tells whether the container has the pod's host name rather than the node's: all but on host network.
func (m Modes) UTS() bool { return m.Network != runtimeapi.NamespaceMode_NODE }

// PodModes gives the namespaces that the pod has of its own, which a shared PID namespace (POD) needs a process for.
func PodModes(p *sandbox.Pod) Modes {
	return modesOf(p.Config.GetLinux().GetSecurityContext().GetNamespaceOptions())
}

// ContainerModes gives a container's namespaces. POD means "as the pod has it" and is what a request that says
// nothing means, so in a pod on the host network it is the host's.
func ContainerModes(p *sandbox.Pod, c *sandbox.Container) Modes {
	pod, m := PodModes(p), modesOf(c.Config.GetLinux().GetSecurityContext().GetNamespaceOptions())
	for _, mode := range []struct{ mine, pods *runtimeapi.NamespaceMode }{
		{&m.Network, &pod.Network}, {&m.PID, &pod.PID}, {&m.IPC, &pod.IPC},
	} {
		if *mode.mine == runtimeapi.NamespaceMode_POD {
			*mode.mine = *mode.pods
		}
	}
	return m
}

func modesOf(o *runtimeapi.NamespaceOption) Modes {
	return Modes{Network: o.GetNetwork(), PID: o.GetPid(), IPC: o.GetIpc(), Target: o.GetTargetId()}
}

// checkPodNamespaces refuses what a pod cannot have.
func checkPodNamespaces(o *runtimeapi.NamespaceOption) error {
	const field = "linux.security_context.namespace_options"
	if err := checkModes(field, o); err != nil {
		return err
	}
	if o.GetPid() == runtimeapi.NamespaceMode_TARGET {
		return invalid(field+".pid", "a pod cannot TARGET a container of its own")
	}
	return nil
}

// checkContainerNamespaces refuses namespaces that do not go with the pod's: a container may have less in common
// with its pod than the others, but not reach the node around it.
func checkContainerNamespaces(p *sandbox.Pod, o *runtimeapi.NamespaceOption) error {
	const field = "linux.security_context.namespace_options"
	if err := checkModes(field, o); err != nil {
		return err
	}
	pod := PodModes(p)
	for _, mode := range []struct {
		name       string
		mine, pods runtimeapi.NamespaceMode
	}{{"network", o.GetNetwork(), pod.Network}, {"pid", o.GetPid(), pod.PID}, {"ipc", o.GetIpc(), pod.IPC}} {
		if mode.mine == runtimeapi.NamespaceMode_NODE && mode.pods != runtimeapi.NamespaceMode_NODE {
			return invalid(field+"."+mode.name, "NODE in a pod whose own is %s", mode.pods)
		}
	}
	switch target := o.GetPid() == runtimeapi.NamespaceMode_TARGET; {
	case target && o.GetTargetId() == "":
		return invalid(field+".target_id", "missing with pid: TARGET")
	case !target && o.GetTargetId() != "":
		return invalid(field+".target_id", "only goes with pid: TARGET")
	}
	return nil
}

func checkModes(field string, o *runtimeapi.NamespaceOption) error {
	for name, mode := range map[string]runtimeapi.NamespaceMode{"network": o.GetNetwork(), "pid": o.GetPid(), "ipc": o.GetIpc()} {
		if _, ok := runtimeapi.NamespaceMode_name[int32(mode)]; !ok {
			return invalid(field+"."+name, "unknown mode %d", mode)
		}
		if mode == runtimeapi.NamespaceMode_TARGET && name != "pid" {
			return invalid(field+"."+name, "TARGET is for pid only")
		}
	}
	if o.GetNetwork() == runtimeapi.NamespaceMode_CONTAINER {
		return unsupported(field+".network", "a network namespace for one container; use POD or NODE")
	}
	if u := o.GetUsernsOptions(); u != nil && u.GetMode() != runtimeapi.NamespaceMode_NODE {
		return unsupported(field+".userns_options", "user namespaces are not available on this node; set hostUsers: true")
	}
	return nil
}

// namespaces lists what the container joins (a path) and what is made for it (no path). A kind that is not in the
// list is the node's.
func namespaces(in Input, m Modes, h Host) ([]specs.LinuxNamespace, error) {
	list := []specs.LinuxNamespace{{Type: specs.MountNamespace}}
	for _, ns := range []struct {
		kind specs.LinuxNamespaceType
		mode runtimeapi.NamespaceMode
		path string
	}{
		{specs.NetworkNamespace, m.Network, in.Net},
		{specs.IPCNamespace, m.IPC, in.IPC},
		{specs.PIDNamespace, m.PID, in.PID},
	} {
		switch ns.mode {
		case runtimeapi.NamespaceMode_NODE:
			continue
		case runtimeapi.NamespaceMode_CONTAINER:
			ns.path = ""
		default:
			if ns.path == "" {
				return nil, fmt.Errorf("container %s: the path of its %s namespace (%s) was not given", in.Container.ID, ns.kind, ns.mode)
			}
		}
		list = append(list, specs.LinuxNamespace{Type: ns.kind, Path: ns.path})
	}
	if m.UTS() {
		list = append(list, specs.LinuxNamespace{Type: specs.UTSNamespace, Path: in.UTS})
	}
	// A privileged container sees the cgroups of the node. On v1 there is none: OCI runtimes then bind the container's
	// own part of each hierarchy instead.
	if h.CgroupV2 && !in.Container.Config.GetLinux().GetSecurityContext().GetPrivileged() {
		list = append(list, specs.LinuxNamespace{Type: specs.CgroupNamespace})
	}
	return list, nil
}
