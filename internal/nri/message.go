package nri

import (
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// podMessage describes a pod to plugins.
func podMessage(p *node.Pod) *api.PodSandbox {
	m, linux := p.Config.GetMetadata(), p.Config.GetLinux()
	pod := &api.PodSandbox{
		Id: p.ID, Name: m.GetName(), Uid: m.GetUid(), Namespace: m.GetNamespace(), RuntimeHandler: p.RuntimeHandler(),
		Labels: maps.Clone(p.Config.GetLabels()), Annotations: maps.Clone(p.Config.GetAnnotations()),
		Linux: &api.LinuxPodSandbox{
			PodOverhead: resourcesMessage(linux.GetOverhead()), PodResources: resourcesMessage(linux.GetResources()),
			CgroupParent: linux.GetCgroupParent(),
		},
	}
	if p.Netns != "" {
		pod.Linux.Namespaces = []*api.LinuxNamespace{{Type: "network", Path: p.Netns}}
	}
	for _, ip := range p.IPs {
		pod.Ips = append(pod.Ips, ip.String())
	}
	return pod
}

// containerMessage describes a container to plugins, with its OCI specification or, if it has none, with what its
// configuration says.
func containerMessage(c *node.Container, s *specs.Spec) *api.Container {
	m := &api.Container{
		Id: c.ID, PodSandboxId: c.PodID, Name: c.Config.GetMetadata().GetName(), State: stateOf(c.State), Pid: uint32(c.Pid),
		Labels: maps.Clone(c.Config.GetLabels()), Annotations: map[string]string{},
		CreatedAt: nanoseconds(c.CreatedAt), StartedAt: nanoseconds(c.StartedAt), FinishedAt: nanoseconds(c.FinishedAt),
		ExitCode: c.ExitCode, StatusReason: c.Reason, StatusMessage: c.Message,
		Image: &api.Image{Name: c.Config.GetImage().GetImage(), ConfigDigest: c.ImageID},
	}
	if _, digest, ok := strings.Cut(c.ImageRef, "@"); ok {
		m.Image.Digest = digest
	}
	for _, d := range c.Config.GetCDIDevices() {
		m.CDIDevices = append(m.CDIDevices, &api.CDIDevice{Name: d.GetName()})
	}
	if s == nil {
		describeConfig(m, c.Config)
	} else {
		describeSpec(m, s)
	}
	maps.Copy(m.Annotations, c.Adjustment.GetAnnotations())
	maps.Copy(m.Annotations, c.Config.GetAnnotations())
	return m
}

func describeConfig(m *api.Container, config *runtimeapi.ContainerConfig) {
	m.Args = slices.Concat(config.GetCommand(), config.GetArgs())
	for _, e := range config.GetEnvs() {
		m.Env = append(m.Env, e.GetKey()+"="+string(e.GetValue()))
	}
	for _, mount := range config.GetMounts() {
		options := []string{"rbind", "rw"}
		if mount.GetReadonly() {
			options[1] = "ro"
		}
		m.Mounts = append(m.Mounts,
			&api.Mount{Destination: mount.GetContainerPath(), Source: mount.GetHostPath(), Type: "bind", Options: options})
	}
	m.Linux = &api.LinuxContainer{Resources: resourcesMessage(config.GetLinux().GetResources())}
}

func describeSpec(m *api.Container, s *specs.Spec) {
	maps.Copy(m.Annotations, s.Annotations)
	m.Mounts, m.Hooks = api.FromOCIMounts(s.Mounts), api.FromOCIHooks(s.Hooks)
	m.Linux = &api.LinuxContainer{}
	if p := s.Process; p != nil {
		m.Args, m.Env = p.Args, p.Env
		m.User = &api.User{Uid: p.User.UID, Gid: p.User.GID, AdditionalGids: p.User.AdditionalGids}
		m.Linux.OomScoreAdj, m.Linux.IoPriority, m.Linux.Scheduler = api.Int(p.OOMScoreAdj), api.FromOCILinuxIOPriority(p.IOPriority),
			api.FromOCILinuxScheduler(p.Scheduler)
		for _, l := range p.Rlimits {
			m.Rlimits = append(m.Rlimits, &api.POSIXRlimit{Type: l.Type, Hard: l.Hard, Soft: l.Soft})
		}
	}
	if l := s.Linux; l != nil {
		m.Linux.Namespaces, m.Linux.Devices = api.FromOCILinuxNamespaces(l.Namespaces), api.FromOCILinuxDevices(l.Devices)
		m.Linux.Resources, m.Linux.CgroupsPath = api.FromOCILinuxResources(l.Resources, nil), l.CgroupsPath
		m.Linux.Sysctl, m.Linux.NetDevices = maps.Clone(l.Sysctl), api.FromOCILinuxNetDevices(l.NetDevices)
		if l.Seccomp != nil {
			m.Linux.SeccompPolicy = api.FromOCILinuxSeccomp(l.Seccomp)
		}
		if r := l.IntelRdt; r != nil {
			m.Linux.Rdt = &api.LinuxRdt{ClosId: api.String(r.ClosID), Schemata: api.RepeatedString(r.Schemata),
				EnableMonitoring: api.Bool(r.EnableMonitoring)}
		}
	}
}

// stateOf returns a container's state in NRI, which has no states before Created and between Created and Running.
func stateOf(s node.State) api.ContainerState {
	switch s {
	case node.Running:
		return api.ContainerState_CONTAINER_RUNNING
	case node.Stopped:
		return api.ContainerState_CONTAINER_STOPPED
	default:
		return api.ContainerState_CONTAINER_CREATED
	}
}

func nanoseconds(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixNano()
}
