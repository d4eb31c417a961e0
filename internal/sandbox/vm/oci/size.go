package oci

import (
	"context"
	"errors"
	"fmt"
	"path"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/fields"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/resources"
)

// fpResized is between the node's limits and the guest's.
var fpResized = failpoint.New("vm-oci.resize.machine")

// machineSize is what a pod's machine has for containers.
type machineSize struct {
	memory uint64 // in bytes
	quota  int64  // CPU time in µs per QuotaPeriod; 0 and -1 mean no limit
	cpus   int    // the CPUs that the containers' quotas can keep busy
}

// limit replaces the limits that a pod has by those of this size.
func (s machineSize) limit(pod *runtimeapi.LinuxContainerResources) {
	if pod.GetMemoryLimitInBytes() > 0 {
		pod.MemoryLimitInBytes = int64(s.memory)
	}
	if pod.GetCpuQuota() > 0 {
		pod.CpuQuota, pod.CpuPeriod = s.quota, resources.QuotaPeriod
	}
}

// podSize returns the size of a pod without containers.
func (o *Backend) podSize(p *sandbox.Pod) machineSize {
	res := p.Config.GetLinux().GetResources()
	s := machineSize{memory: o.cfg.VM.DefaultMemory, quota: resources.QuotaOf(res)}
	if limit := res.GetMemoryLimitInBytes(); limit > 0 {
		s.memory = uint64(limit)
	}
	return s
}

// size returns what a pod's containers need together. changed has those whose resources are about to be recorded.
//
// A kubelet sends the sum of those limits that the pod's containers have, which is no limit for a container without one. It
// limits the pod's cgroup itself where all are limited. Other callers mean what they send.
func (o *Backend) size(p *sandbox.Pod, changed map[string]grant) machineSize {
	s := o.podSize(p)
	var memory uint64
	var quota int64
	var unlimitedMemory, unlimitedCPU bool
	for _, c := range o.grantedIn(p.ID, changed) {
		unlimitedMemory = unlimitedMemory || c.Memory <= 0
		unlimitedCPU = unlimitedCPU || c.Quota <= 0
		memory += uint64(max(c.Memory, 0))
		quota += max(c.Quota, 0)
	}
	if unlimitedMemory {
		memory += o.cfg.VM.DefaultMemory
	}
	s.cpus = resources.CPUsOf(quota)
	res := p.Config.GetLinux().GetResources()
	sums := p.Config.GetLinux().GetCgroupParent() != ""
	if sums || res.GetMemoryLimitInBytes() <= 0 {
		s.memory = max(s.memory, min(memory, o.mostMemory(p)))
	}
	switch {
	case s.quota <= 0 || !sums:
	case unlimitedCPU:
		s.quota = -1
	default:
		s.quota = max(s.quota, quota)
	}
	return s
}

// grantedIn returns the resources of all containers of a pod that have not ended, with those that are about to change.
func (o *Backend) grantedIn(pod string, changed map[string]grant) (all []grant) {
	for _, h := range o.ledger.All() {
		_, replaced := changed[h.ID]
		if s, _ := h.Snapshot(); h.PodID == pod && !replaced && (s.Phase == ledger.Created || s.Phase == ledger.Started) {
			all = append(all, s.Granted)
		}
	}
	for _, granted := range changed {
		all = append(all, granted)
	}
	return all
}

// mostMemory returns the most memory in bytes that the containers of a pod can have: what the machine can grow to, within the
// limit of the pod's parent cgroup.
func (o *Backend) mostMemory(p *sandbox.Pod) uint64 {
	d, _ := o.machines.Definition(p.ID)
	if d == nil {
		return 0
	}
	most := d.MostMemory()
	limit, err := o.machines.Cgroups().MemoryLimit(path.Dir(d.Cgroup))
	if overhead := o.cfg.VM.MemoryOverhead; err == nil && limit > overhead {
		most = min(most, limit-overhead)
	}
	return most - min(most, resources.GuestOverhead)
}

// fit makes a pod's machine large enough for its containers. changed has those whose resources are about to be recorded.
func (o *Backend) fit(ctx context.Context, pod *podMachine, p *sandbox.Pod, changed map[string]grant) error {
	pod.sizing.Lock()
	defer pod.sizing.Unlock()
	m, err := o.machines.Machine(p.ID)
	if err != nil {
		return fmt.Errorf("the pod's machine: %w", err)
	}
	if m.Definition.Growth == nil {
		return nil
	}
	size := o.size(p, changed)
	now, err := o.machines.Cgroups().Memory(m.Definition.Cgroup)
	if err != nil {
		return err
	}
	size.memory = max(size.memory, now-min(now, resources.GuestOverhead)) // it does not shrink when a container has ended
	if size.cpus <= m.CPUs {                                              // nor does it lose CPUs
		size.cpus = pod.size.cpus
	}
	if size == pod.size {
		return nil
	}
	return o.resize(ctx, pod, p, size)
}

// resize gives a pod's machine a size: the machine's limits first, so that the guest never has more than the node gives. The
// caller holds pod.sizing. A machine that cannot have the memory gets the rest, and the error is sandbox.ErrMemoryKept.
func (o *Backend) resize(ctx context.Context, pod *podMachine, p *sandbox.Pod, size machineSize) error {
	inner, err := guestPod(p, size)
	if err != nil {
		return err
	}
	mp, mc := o.machineOf(p, size)
	kept, err := o.updateMachine(ctx, mp, mc)
	if err != nil {
		return err
	}
	cpus, err := o.addCPUs(ctx, mp, mc, size)
	if err != nil {
		return err
	}
	if res := inner.Config.GetLinux().GetResources(); kept != nil && res != nil {
		res.MemoryLimitInBytes, res.MemorySwapLimitInBytes = 0, 0 // the guest leaves its limits unchanged, too
	}
	if err := fpResized.Hit(ctx); err != nil {
		return err
	}
	if err := o.call(ctx, p.ID, guestapi.Request{Method: guestapi.MethodUpdatePod}, guestapi.Pod{Pod: *inner, CPUs: cpus}, nil); err != nil {
		return err
	}
	if err := o.haveCPUs(p.ID, cpus); err != nil {
		return err
	}
	if kept == nil {
		pod.size = size
	}
	return kept
}

// updateMachine changes a machine's limits. The first error says why its memory cannot change, if all others could.
func (o *Backend) updateMachine(ctx context.Context, mp *sandbox.Pod, mc *sandbox.Container) (kept, err error) {
	m, err := o.machines.Machine(mp.ID)
	if err != nil {
		return nil, err
	}
	now, err := o.machines.Cgroups().Memory(m.Definition.Cgroup)
	if err != nil {
		return nil, err
	}
	err = o.machines.UpdateContainer(ctx, mp, mc)
	if errdefs.IsNotImplemented(err) && now > 0 {
		return fmt.Errorf("%w: %w", sandbox.ErrMemoryKept, err),
			o.machines.Cgroups().Limit(m.Definition.Cgroup, now, mc.Config.GetLinux().GetResources())
	}
	return nil, err
}

// addCPUs adds the CPUs that a machine of this size has beyond those that it has, and returns how many the guest has to put
// online: 0 means that they have not changed. It does nothing to those that an interrupted call has added.
func (o *Backend) addCPUs(ctx context.Context, mp *sandbox.Pod, mc *sandbox.Container, size machineSize) (int, error) {
	m, err := o.machines.Machine(mp.ID)
	if err != nil {
		return 0, err
	}
	cpus, fixed, err := o.machines.Requested(mp, mc)
	if err != nil || fixed || m.Definition.Growth == nil {
		return 0, err
	}
	cpus = min(max(cpus, size.cpus), m.Definition.Growth.CPUs)
	if cpus <= m.CPUs {
		return 0, nil
	}
	switch err := o.machines.Driver().AddCPUs(ctx, mp.ID, cpus); {
	case errdefs.IsNotImplemented(err):
		o.log.Warn("a pod's machine keeps its number of CPUs", "pod", mp.ID, "reason", err)
		return 0, nil
	case err != nil:
		return 0, err
	}
	return cpus, nil
}

// haveCPUs records that a machine's guest has put so many CPUs online.
func (o *Backend) haveCPUs(id string, cpus int) error {
	if cpus == 0 {
		return nil
	}
	return o.machines.SetCPUs(id, cpus)
}

// awaitGrowth waits until a machine that has just booted has all its memory.
func (o *Backend) awaitGrowth(ctx context.Context, id string) error {
	m, err := o.machines.Machine(id)
	if err != nil {
		return err
	}
	if m.Definition.Memory == m.Definition.BootMemory() {
		return nil
	}
	err = o.machines.Driver().SetMemory(ctx, id, m.Definition.Memory)
	if errdefs.IsNotImplemented(err) { // our guest has the driver, so it is busy, or broken
		err = errors.Join(errdefs.ErrUnavailable, err)
	}
	return err
}

// checkMemory refuses a container's limit in bytes that is more than its machine can have for containers.
func (o *Backend) checkMemory(p *sandbox.Pod, id string, granted grant) error {
	m, err := o.machines.Machine(p.ID)
	if err != nil {
		return fmt.Errorf("the pod's machine: %w", err)
	}
	most := m.Definition.MostMemory()
	has := min(most-min(most, resources.GuestOverhead), o.size(p, map[string]grant{id: granted}).memory)
	if resources.WholeMiB(uint64(granted.Memory)) > has {
		return fields.Unsupported("linux.resources.memory_limit_in_bytes",
			"%d is more than the %d bytes that the pod's machine can have for containers", granted.Memory, has)
	}
	return nil
}

// warnOfMemory warns of a container without a memory limit in a machine that has only the memory of the pod's limits.
func (o *Backend) warnOfMemory(p *sandbox.Pod, c *sandbox.Container) {
	limit := p.Config.GetLinux().GetResources().GetMemoryLimitInBytes()
	granted := grantedTo(c)
	if limit <= 0 || granted.Memory > 0 || o.size(p, map[string]grant{c.ID: granted}).memory > uint64(limit) {
		return
	}
	o.log.Warn("a container without a memory limit shares the memory of its pod's limits", "pod", p.ID, "container", c.ID,
		"reason", fmt.Sprintf("the machine has %s for containers, the limit of the pod; set a memory limit for each container",
			resources.Quantity(uint64(limit))))
}
