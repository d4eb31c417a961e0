package vm

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
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/stats"
)

// fpOCIResized is between the node's limits and the guest's.
var fpOCIResized = failpoint.New("vm-oci.resize.machine")

const (
	// guestBoot is the memory in bytes with which machines boot, unless they have less. They grow to their size at once. So
	// machines of all sizes continue from the same templates.
	guestBoot = guestOverhead + 64<<20
	// maxGrowth is the most memory in bytes to which a machine can grow, because QEMU needs 0.1 MiB for each GiB of that.
	// Machines with more than half of it can grow to hugeGrowth: some models of processors have addresses of 40 bits.
	maxGrowth  = 64 << 30
	hugeGrowth = 512 << 30
	// maxGrowthCPUs is the most CPUs that a machine can get while it runs. A guest's kernel needs 0.3 MB for each one that can
	// come.
	maxGrowthCPUs = 32
	// quotaPeriod is the period in µs of quotas of several containers together.
	quotaPeriod = 100_000
)

// growth returns how far a machine with this memory in bytes and these CPUs can grow on this node, or nil if it cannot.
func growth(memory uint64, cpus int) *machine.Growth {
	most := min(nodeMemory(), maxGrowth)
	if memory > maxGrowth/2 {
		most = min(nodeMemory(), hugeGrowth)
	}
	if most <= memory {
		return nil
	}
	return &machine.Growth{Boot: min(memory, guestBoot), Memory: most, CPUs: max(cpus, min(nodeCPUs(), maxGrowthCPUs))}
}

// nodeMemory returns the node's memory in bytes. It is rounded down, so that another kernel of the node finds the same value.
func nodeMemory() uint64 { return stats.NodeMemory() &^ (256<<20 - 1) }

// ociSize is what a pod's machine has for containers.
type ociSize struct {
	memory uint64 // in bytes
	quota  int64  // CPU time in µs per quotaPeriod; 0 and -1 mean no limit
	cpus   int    // the CPUs that the containers' quotas can keep busy
}

// limit replaces the limits that a pod has by those of this size.
func (s ociSize) limit(pod *runtimeapi.LinuxContainerResources) {
	if pod.GetMemoryLimitInBytes() > 0 {
		pod.MemoryLimitInBytes = int64(s.memory)
	}
	if pod.GetCpuQuota() > 0 {
		pod.CpuQuota, pod.CpuPeriod = s.quota, quotaPeriod
	}
}

// podSize returns the size of a pod without containers.
func (o *OCI) podSize(p *sandbox.Pod) ociSize {
	res := p.Config.GetLinux().GetResources()
	s := ociSize{memory: o.machines.cfg.VM.DefaultMemory, quota: quotaOf(res)}
	if limit := res.GetMemoryLimitInBytes(); limit > 0 {
		s.memory = uint64(limit)
	}
	return s
}

// quotaOf returns a quota in µs per quotaPeriod, 0 if it is not set, or -1 if there shall be none.
func quotaOf(res *runtimeapi.LinuxContainerResources) int64 {
	quota, period := res.GetCpuQuota(), res.GetCpuPeriod()
	switch {
	case quota <= 0:
		return max(quota, -1)
	case period <= 0:
		return quota
	}
	return (quota*quotaPeriod + period - 1) / period
}

// cpusOf returns how many CPUs a quota in µs per quotaPeriod can keep busy.
func cpusOf(quota int64) int { return int((quota + quotaPeriod - 1) / quotaPeriod) }

// size returns what a pod's containers need together. changed has those whose resources are about to be recorded.
//
// A kubelet sends the sum of those limits that the pod's containers have, which is no limit for a container without one. It
// limits the pod's cgroup itself where all are limited. Other callers mean what they send.
func (o *OCI) size(p *sandbox.Pod, changed map[string]ociGranted) ociSize {
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
		memory += o.machines.cfg.VM.DefaultMemory
	}
	s.cpus = cpusOf(quota)
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
func (o *OCI) grantedIn(pod string, changed map[string]ociGranted) (all []ociGranted) {
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
func (o *OCI) mostMemory(p *sandbox.Pod) uint64 {
	h, _ := o.machines.ledger.Find(p.ID, p.ID)
	if h == nil {
		return 0
	}
	s, _ := h.Snapshot()
	most := s.Definition.MostMemory()
	limit, err := o.machines.cgroups.MemoryLimit(path.Dir(s.Definition.Cgroup))
	if overhead := o.machines.cfg.VM.MemoryOverhead; err == nil && limit > overhead {
		most = min(most, limit-overhead)
	}
	return most - min(most, guestOverhead)
}

// memoryNow returns the memory in bytes that a running machine may use, which its cgroup says, or 0 if it is not limited.
func (b *Backend) memoryNow(d machine.Definition) (uint64, error) {
	limit, err := b.cgroups.MemoryLimit(d.Cgroup)
	if err != nil {
		return 0, err
	}
	return limit - min(limit, b.cfg.VM.MemoryOverhead), nil
}

// fit makes a pod's machine large enough for its containers. changed has those whose resources are about to be recorded.
func (o *OCI) fit(ctx context.Context, pod *ociPod, p *sandbox.Pod, changed map[string]ociGranted) error {
	pod.sizing.Lock()
	defer pod.sizing.Unlock()
	h, err := o.machines.ledger.Get(p.ID, p.ID)
	if err != nil {
		return fmt.Errorf("the pod's machine: %w", err)
	}
	s, _ := h.Snapshot()
	if s.Definition.Growth == nil {
		return nil
	}
	size := o.size(p, changed)
	now, err := o.machines.memoryNow(s.Definition)
	if err != nil {
		return err
	}
	size.memory = max(size.memory, now-min(now, guestOverhead)) // it does not shrink when a container has ended
	if size.cpus <= s.cpus() {                                  // nor does it lose CPUs
		size.cpus = pod.size.cpus
	}
	if size == pod.size {
		return nil
	}
	return o.resize(ctx, pod, p, size)
}

// resize gives a pod's machine a size: the machine's limits first, so that the guest never has more than the node gives. The
// caller holds pod.sizing. A machine that cannot have the memory gets the rest, and the error is sandbox.ErrMemoryKept.
func (o *OCI) resize(ctx context.Context, pod *ociPod, p *sandbox.Pod, size ociSize) error {
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
	if err := fpOCIResized.Hit(ctx); err != nil {
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
func (o *OCI) updateMachine(ctx context.Context, mp *sandbox.Pod, mc *sandbox.Container) (kept, err error) {
	h, err := o.machines.ledger.Get(mp.ID, mc.ID)
	if err != nil {
		return nil, err
	}
	s, _ := h.Snapshot()
	now, err := o.machines.memoryNow(s.Definition)
	if err != nil {
		return nil, err
	}
	err = o.machines.UpdateContainer(ctx, mp, mc)
	if errdefs.IsNotImplemented(err) && now > 0 {
		return fmt.Errorf("%w: %w", sandbox.ErrMemoryKept, err), o.machines.limit(s.Definition.Cgroup, now, mc.Config.GetLinux().GetResources())
	}
	return nil, err
}

// addCPUs adds the CPUs that a machine of this size has beyond those that it has, and returns how many the guest has to put
// online: 0 means that they have not changed. It does nothing to those that an interrupted call has added.
func (o *OCI) addCPUs(ctx context.Context, mp *sandbox.Pod, mc *sandbox.Container, size ociSize) (int, error) {
	h, err := o.machines.ledger.Get(mp.ID, mc.ID)
	if err != nil {
		return 0, err
	}
	s, _ := h.Snapshot()
	options, _, err := o.machines.options(mp)
	if err != nil || options.VCPUsSet || s.Definition.Growth == nil {
		return 0, err
	}
	cpus := min(max(o.machines.cpus(options, sandbox.Resources(mp, mc)), size.cpus), s.Definition.Growth.CPUs)
	if cpus <= s.cpus() {
		return 0, nil
	}
	switch err := o.machines.cfg.Driver.AddCPUs(ctx, mp.ID, cpus); {
	case errdefs.IsNotImplemented(err):
		o.log.Warn("a pod's machine keeps its number of CPUs", "pod", mp.ID, "reason", err)
		return 0, nil
	case err != nil:
		return 0, err
	}
	return cpus, nil
}

// haveCPUs records that a machine's guest has put so many CPUs online.
func (o *OCI) haveCPUs(id string, cpus int) error {
	if cpus == 0 {
		return nil
	}
	h, err := o.machines.ledger.Get(id, id)
	if err != nil {
		return err
	}
	return h.Set(func(s *state) { s.CPUs = cpus })
}

// awaitGrowth waits until a machine that has just booted has all its memory.
func (o *OCI) awaitGrowth(ctx context.Context, id string) error {
	h, err := o.machines.ledger.Get(id, id)
	if err != nil {
		return err
	}
	s, _ := h.Snapshot()
	if s.Definition.Memory == s.Definition.BootMemory() {
		return nil
	}
	err = o.machines.cfg.Driver.SetMemory(ctx, id, s.Definition.Memory)
	if errdefs.IsNotImplemented(err) { // our guest has the driver, so it is busy, or broken
		err = errors.Join(errdefs.ErrUnavailable, err)
	}
	return err
}

// checkMemory refuses a container's limit in bytes that is more than its machine can have for containers.
func (o *OCI) checkMemory(p *sandbox.Pod, id string, granted ociGranted) error {
	h, err := o.machines.ledger.Get(p.ID, p.ID)
	if err != nil {
		return fmt.Errorf("the pod's machine: %w", err)
	}
	s, _ := h.Snapshot()
	most := s.Definition.MostMemory()
	has := min(most-min(most, guestOverhead), o.size(p, map[string]ociGranted{id: granted}).memory)
	if wholeMiB(uint64(granted.Memory)) > has {
		return fields.Unsupported("linux.resources.memory_limit_in_bytes", "%d is more than the %d bytes that the pod's machine can have for containers", granted.Memory, has)
	}
	return nil
}

// warnOfMemory warns of a container without a memory limit in a machine that has only the memory of the pod's limits.
func (o *OCI) warnOfMemory(p *sandbox.Pod, c *sandbox.Container) {
	limit := p.Config.GetLinux().GetResources().GetMemoryLimitInBytes()
	granted := grantedTo(c)
	if limit <= 0 || granted.Memory > 0 || o.size(p, map[string]ociGranted{c.ID: granted}).memory > uint64(limit) {
		return
	}
	o.log.Warn("a container without a memory limit shares the memory of its pod's limits", "pod", p.ID, "container", c.ID,
		"reason", fmt.Sprintf("the machine has %s for containers, the limit of the pod; set a memory limit for each container", quantity(uint64(limit))))
}
