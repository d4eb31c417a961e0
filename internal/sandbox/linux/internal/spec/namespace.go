package spec

import (
	"fmt"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// Modes says which namespaces a container uses: the pod's (POD), its own (CONTAINER), the node's (NODE) or another
// container's (TARGET, PID only).
type Modes struct {
	Network, PID, IPC runtimeapi.NamespaceMode
	// Target is the ID of the container whose PID namespace is joined, if PID is TARGET.
	Target string
}

// UTS reports whether the container has the pod's host name. A container on the host network has the node's.
func (m Modes) UTS() bool { return m.Network != runtimeapi.NamespaceMode_NODE }

// PodModes returns the namespaces that a pod uses. A PID namespace for all its containers (POD) needs an init process.
func PodModes(p *sandbox.Pod) Modes {
	return modesOf(p.Config.GetLinux().GetSecurityContext().GetNamespaceOptions())
}

// ContainerModes returns a container's namespaces. The default, POD, means the namespace that the pod uses. If the pod
// is on the host network, POD therefore means the host's network namespace.
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

func checkPodNamespaces(o *runtimeapi.NamespaceOption, h Host) error {
	const field = "linux.security_context.namespace_options"
	if err := checkModes(field, o); err != nil {
		return err
	}
	if o.GetPid() == runtimeapi.NamespaceMode_TARGET {
		return invalid(field+".pid", "a pod cannot TARGET a container")
	}
	return checkPodUsers(field, o, h)
}

// checkPodUsers checks a pod's user namespace. Only the user namespace that owns the node's PID and IPC namespaces can
// mount /proc and /dev/mqueue for them.
func checkPodUsers(field string, o *runtimeapi.NamespaceOption, h Host) error {
	users := o.GetUsernsOptions()
	m, err := sandbox.ParseIDMap(users)
	switch {
	case err != nil:
		return err
	case !sandbox.WantsUserNamespace(users):
		return nil
	case h.UserNamespaces != nil:
		return unsupported(field+".userns_options", "user namespaces are not available on this node (%v); set hostUsers: true", h.UserNamespaces)
	case m == nil:
		return invalid(field+".userns_options", "the mappings are missing")
	case o.GetPid() == runtimeapi.NamespaceMode_NODE:
		return invalid(field+".pid", "must not be NODE in a pod with a user namespace")
	case o.GetIpc() == runtimeapi.NamespaceMode_NODE:
		return invalid(field+".ipc", "must not be NODE in a pod with a user namespace")
	}
	return nil
}

// checkContainerNamespaces rejects namespaces that conflict with the pod's. A container can have namespaces of its own,
// but must not use one of the node's namespaces unless the pod uses it too.
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
			return invalid(field+"."+mode.name, "must not be NODE in a pod with %s", mode.pods)
		}
	}
	if err := checkContainerUsers(p, field+".userns_options", o.GetUsernsOptions()); err != nil {
		return err
	}
	switch target := o.GetPid() == runtimeapi.NamespaceMode_TARGET; {
	case target && o.GetTargetId() == "":
		return invalid(field+".target_id", "must be set with pid: TARGET")
	case !target && o.GetTargetId() != "":
		return invalid(field+".target_id", "must not be set without pid: TARGET")
	}
	return nil
}

// checkContainerUsers rejects a user namespace other than the pod's. A container that requests none gets the pod's.
func checkContainerUsers(p *sandbox.Pod, field string, o *runtimeapi.UserNamespace) error {
	mine, err := sandbox.ParseIDMap(o)
	pods := p.IDMap()
	switch {
	case err != nil || o == nil:
		return err
	case pods == nil && sandbox.WantsUserNamespace(o):
		return invalid(field, "the pod has no user namespace")
	case pods != nil && !sandbox.WantsUserNamespace(o):
		return invalid(field+".mode", "must not be NODE in a pod with a user namespace")
	case mine != nil && *mine != *pods:
		return invalid(field, "the mappings differ from the pod's")
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
		return unsupported(field+".network", "a container cannot have its own network namespace; use POD or NODE")
	}
	return nil
}

// namespaces lists the namespaces that the container joins (with a path) and those created for it (without a path). The
// container shares every other kind of namespace with the node.
func namespaces(in Input, m Modes, h Host) ([]specs.LinuxNamespace, error) {
	list := []specs.LinuxNamespace{{Type: specs.MountNamespace}}
	if in.Pod.IDMap() != nil {
		list = append(list, specs.LinuxNamespace{Type: specs.UserNamespace, Path: in.User})
	}
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
	// A privileged container sees the node's cgroups, so it gets no cgroup namespace. On cgroup v1 no container gets one;
	// OCI runtimes bind-mount the container's own part of each hierarchy instead.
	if h.CgroupV2 && !in.Container.Config.GetLinux().GetSecurityContext().GetPrivileged() {
		list = append(list, specs.LinuxNamespace{Type: specs.CgroupNamespace})
	}
	return list, nil
}
