package spec

import (
	"github.com/containerd/containerd/v2/contrib/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/selinux"
)

const (
	// pauseProgram is the path of the pause binary in its container.
	pauseProgram = "/pause"
	// pauseUser is the default user and group ID. Common systems do not assign it.
	pauseUser = 65535
	// pauseOOMScore makes the process one of the OOM killer's last victims, because the pod's containers end with the
	// process.
	pauseOOMScore = -998
)

// PauseInput configures the process that holds a pod's PID namespace.
type PauseInput struct {
	Pod  *sandbox.Pod
	Host Host
	// Rootfs is an empty directory. The OCI runtime creates mount points in it.
	Rootfs string
	// Binary is a static program on the host that reaps orphans and exits on SIGTERM; Args are its arguments.
	Binary string
	Args   []string
	// Net, IPC and UTS are the pod's namespaces; empty means the host's.
	Net, IPC, UTS string
	// User is the pod's user namespace, if the pod has one (sandbox.Pod.IDMap).
	User        string
	CgroupsPath string
	// Labels are the pod's SELinux labels.
	Labels selinux.Labels
}

// Pause returns the specification of a container that only holds the pod's PID namespace. The container has no
// privileges, and no access to the host's files or devices except the pause binary.
func Pause(in PauseInput) *specs.Spec {
	s := &specs.Spec{
		Version: ociVersion,
		Process: &specs.Process{
			User:            pauseIdentity(in.Pod.Config.GetLinux().GetSecurityContext()),
			Args:            append([]string{pauseProgram}, in.Args...),
			Cwd:             "/",
			Env:             []string{"PATH=/"},
			Capabilities:    &specs.LinuxCapabilities{},
			NoNewPrivileges: true,
			OOMScoreAdj:     new(max(pauseOOMScore, in.Host.OwnOOMScore)),
		},
		Root: &specs.Root{Path: in.Rootfs, Readonly: true},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "noexec", "mode=755", "size=64k"}},
			{Destination: pauseProgram, Type: "bind", Source: in.Binary, Options: []string{"bind", "rprivate", "ro", "nosuid", "nodev"}},
		},
		Annotations: podAnnotations(in.Pod),
		Linux: &specs.Linux{
			CgroupsPath:   in.CgroupsPath,
			Namespaces:    []specs.LinuxNamespace{{Type: specs.MountNamespace}, {Type: specs.PIDNamespace}},
			MaskedPaths:   append([]string{}, defaultMaskedPaths...),
			ReadonlyPaths: append([]string{}, defaultReadonlyPaths...),
			Resources:     &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}},
		},
	}
	s.Linux.UIDMappings, s.Linux.GIDMappings = mappings(in.Pod.IDMap())
	for _, ns := range []specs.LinuxNamespace{
		{Type: specs.UserNamespace, Path: in.User},
		{Type: specs.NetworkNamespace, Path: in.Net}, {Type: specs.IPCNamespace, Path: in.IPC}, {Type: specs.UTSNamespace, Path: in.UTS},
	} {
		if ns.Path != "" {
			s.Linux.Namespaces = append(s.Linux.Namespaces, ns)
		}
	}
	applyLabels(s, in.Labels, in.Pod.Config.GetLinux().GetSecurityContext().GetPrivileged())
	if in.Host.Seccomp {
		s.Linux.Seccomp = seccomp.DefaultProfile(s)
	}
	return s
}

func pauseIdentity(sc *runtimeapi.LinuxSandboxSecurityContext) specs.User {
	u := specs.User{UID: pauseUser, GID: pauseUser}
	if sc.GetRunAsUser() != nil {
		u = specs.User{UID: uint32(sc.GetRunAsUser().GetValue())}
	}
	if sc.GetRunAsGroup() != nil {
		u.GID = uint32(sc.GetRunAsGroup().GetValue())
	}
	return u
}
