package spec

import (
	"errors"
	"path"
	"slices"

	nri "github.com/containerd/nri/pkg/api"
	nrigen "github.com/containerd/nri/pkg/runtime-tools/generate"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// Adjust applies what plugins of the node adjusted to a specification. If it refuses an adjustment, the error is
// errdefs.ErrInvalidArgument or errdefs.ErrNotImplemented and names the field.
func Adjust(s *specs.Spec, a *nri.ContainerAdjustment, h Host) error {
	if a == nil {
		return nil
	}
	if err := errors.Join(checkAdjustment(a), checkRuntime(a.GetLinux(), h.Runtime)); err != nil {
		return err
	}
	if err := apply(s, a); err != nil {
		return invalid("adjustment", "%v", err)
	}
	if s.Linux.Resources == nil {
		s.Linux.Resources = &specs.LinuxResources{}
	}
	return AdjustResources(s.Linux.Resources, a.GetLinux().GetResources())
}

// apply applies everything but limits.
func apply(s *specs.Spec, a *nri.ContainerAdjustment) error {
	g, l := nrigen.SpecGenerator(&generator{spec: s}, nrigen.WithRdtResolver(rdtClass)), a.GetLinux()
	g.AdjustEnv(a.GetEnv())
	g.AdjustArgs(a.GetArgs())
	g.AdjustHooks(a.GetHooks())
	g.AdjustDevices(l.GetDevices())
	g.AdjustOomScoreAdj(l.GetOomScoreAdj())
	g.AdjustIOPriority(l.GetIoPriority())
	g.AdjustLinuxScheduler(l.GetScheduler())
	g.AdjustMemoryPolicy(l.GetMemoryPolicy())
	err := errors.Join(
		g.AdjustAnnotations(a.GetAnnotations()),
		g.AdjustSeccompPolicy(l.GetSeccompPolicy()),
		g.AdjustNamespaces(l.GetNamespaces()),
		g.AdjustSysctl(l.GetSysctl()),
		g.AdjustLinuxNetDevices(l.GetNetDevices()),
		g.AdjustRdtClass(l.GetResources().GetRdtClass().Get()),
		g.AdjustMounts(a.GetMounts()),
		g.AdjustRlimits(a.GetRlimits()),
	)
	g.AdjustRdt(l.GetRdt())
	return err
}

func rdtClass(name string) (*specs.LinuxIntelRdt, error) {
	return &specs.LinuxIntelRdt{ClosID: name}, nil
}

// AdjustResources applies the limits that the CRI cannot express to a container's limits. The node has merged all
// others into the container's configuration.
func AdjustResources(r *specs.LinuxResources, a *nri.LinuxResources) error {
	if a == nil {
		return nil
	}
	if a.BlockioClass != nil {
		return unsupported("adjustment.linux.resources.blockio_class", "the node defines no classes")
	}
	o := a.ToOCI()
	if m := o.Memory; *m != (specs.LinuxMemory{}) {
		if r.Memory == nil {
			r.Memory = &specs.LinuxMemory{}
		}
		overwrite(&r.Memory.Reservation, m.Reservation)
		overwrite(&r.Memory.Swap, m.Swap)
		overwrite(&r.Memory.Kernel, m.Kernel) //nolint:staticcheck // plugins can still set it
		overwrite(&r.Memory.KernelTCP, m.KernelTCP)
		overwrite(&r.Memory.Swappiness, m.Swappiness)
		overwrite(&r.Memory.DisableOOMKiller, m.DisableOOMKiller)
		overwrite(&r.Memory.UseHierarchy, m.UseHierarchy)
	}
	if c := o.CPU; c.RealtimeRuntime != nil || c.RealtimePeriod != nil {
		if r.CPU == nil {
			r.CPU = &specs.LinuxCPU{}
		}
		overwrite(&r.CPU.RealtimeRuntime, c.RealtimeRuntime)
		overwrite(&r.CPU.RealtimePeriod, c.RealtimePeriod)
	}
	if o.Pids != nil {
		r.Pids = o.Pids
	}
	r.Devices = append(r.Devices, o.Devices...)
	return nil
}

func overwrite[T any](field **T, value *T) {
	if value != nil {
		*field = value
	}
}

// checkAdjustment refuses what the node cannot honour, and what the OCI runtime would only refuse at the start.
func checkAdjustment(a *nri.ContainerAdjustment) error {
	const field = "adjustment."
	for _, m := range a.GetMounts() {
		if dest := nri.ClearRemovalMarker(m.GetDestination()); !path.IsAbs(dest) {
			return invalid(field+"mounts", "%q is not an absolute path", dest)
		}
	}
	for _, d := range a.GetLinux().GetDevices() {
		dest, removed := d.IsMarkedForRemoval()
		if !path.IsAbs(dest) {
			return invalid(field+"linux.devices", "%q is not an absolute path", dest)
		}
		if !removed && !slices.Contains([]string{"b", "c", "u", "p"}, d.GetType()) {
			return invalid(field+"linux.devices", "%s: type %q is none of b, c, u and p", dest, d.GetType())
		}
	}
	for _, l := range a.GetRlimits() {
		if !slices.Contains(rlimits, l.GetType()) {
			return invalid(field+"rlimits", "%q is not a limit such as RLIMIT_NOFILE", l.GetType())
		}
		if l.GetSoft() > l.GetHard() {
			return invalid(field+"rlimits", "%s: the soft limit %d exceeds the hard limit %d", l.GetType(), l.GetSoft(), l.GetHard())
		}
	}
	for kind, hooks := range hooksOf(a.GetHooks()) {
		for _, h := range hooks {
			if !path.IsAbs(h.GetPath()) {
				return invalid(field+"hooks."+kind, "%q is not an absolute path", h.GetPath())
			}
		}
	}
	if p := a.GetLinux().GetCgroupsPath(); p != "" {
		return unsupported(field+"linux.cgroups_path", "%s: the node finds a container by its own cgroup", p)
	}
	for _, ns := range a.GetLinux().GetNamespaces() {
		if kind := nri.ClearRemovalMarker(ns.GetType()); kind == "user" || kind == "mount" {
			return unsupported(field+"linux.namespaces", "the %s namespace cannot be changed", kind)
		}
	}
	return nil
}

// Runtime says which recent parts of a specification the OCI runtime knows. It ignores those that it does not know.
type Runtime struct {
	// Processes are the scheduler and the I/O priority of processes.
	Processes               bool
	MemoryPolicy, NetDevice bool
}

// checkRuntime refuses what the OCI runtime would ignore.
func checkRuntime(l *nri.LinuxContainerAdjustment, known Runtime) error {
	for field, missing := range map[string]bool{
		"scheduler":     l.GetScheduler() != nil && !known.Processes,
		"io_priority":   l.GetIoPriority() != nil && !known.Processes,
		"memory_policy": l.GetMemoryPolicy() != nil && !known.MemoryPolicy,
		"net_devices":   len(l.GetNetDevices()) > 0 && !known.NetDevice,
	} {
		if missing {
			return unsupported("adjustment.linux."+field,
				"the OCI runtime does not say that it knows this (its command \"features\"); use a later one")
		}
	}
	return nil
}

func hooksOf(h *nri.Hooks) map[string][]*nri.Hook {
	return map[string][]*nri.Hook{
		"prestart": h.GetPrestart(), "create_runtime": h.GetCreateRuntime(), "create_container": h.GetCreateContainer(),
		"start_container": h.GetStartContainer(), "poststart": h.GetPoststart(), "poststop": h.GetPoststop(),
	}
}

// rlimits are the limits of getrlimit(2).
var rlimits = []string{
	"RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_CPU", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_LOCKS", "RLIMIT_MEMLOCK", "RLIMIT_MSGQUEUE",
	"RLIMIT_NICE", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_RSS", "RLIMIT_RTPRIO", "RLIMIT_RTTIME", "RLIMIT_SIGPENDING", "RLIMIT_STACK",
}
