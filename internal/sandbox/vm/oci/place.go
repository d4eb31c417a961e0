package oci

import (
	"fmt"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/utils/cpuset"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/resources"
)

// grant are those of a container's resources that concern its machine: the CPUs and memory nodes, which are the node's,
// the memory limit in bytes, and the CPU time in µs per QuotaPeriod. 0 and -1 mean no limit.
type grant struct {
	CPUs   string `json:"cpus,omitempty"`
	Mems   string `json:"mems,omitempty"`
	Memory int64  `json:"memory,omitempty"`
	Quota  int64  `json:"quota,omitempty"`
}

func grantedTo(c *sandbox.Container) grant {
	res := c.Config.GetLinux().GetResources()
	return grant{CPUs: res.GetCpusetCpus(), Mems: res.GetCpusetMems(), Memory: res.GetMemoryLimitInBytes(), Quota: resources.QuotaOf(res)}
}

// guestResources removes the resources that mean the node's hardware. In the guest, the same numbers are other CPUs, or none.
func guestResources(res *runtimeapi.LinuxContainerResources) {
	if res != nil {
		res.CpusetCpus, res.CpusetMems, res.HugepageLimits = "", "", nil
	}
}

// place binds a pod's machine to the CPUs and memory nodes of the pod and of all its containers that have not ended. The
// argument changed has the containers whose resources are about to be recorded. If nobody asks for CPUs, the machine keeps
// those that it has.
func (o *Backend) place(pod *podMachine, p *sandbox.Pod, changed map[string]grant) error {
	pod.cpus.Lock()
	defer pod.cpus.Unlock()
	res := p.Config.GetLinux().GetResources()
	all := append(o.grantedIn(p.ID, changed), grant{CPUs: res.GetCpusetCpus(), Mems: res.GetCpusetMems()})
	var cpus, mems cpuset.CPUSet
	for _, granted := range all {
		of, err := granted.parse()
		if err != nil {
			return err
		}
		cpus, mems = cpus.Union(of.cpus), mems.Union(of.mems)
	}
	if cpus.IsEmpty() && mems.IsEmpty() {
		return nil
	}
	m, err := o.machines.Machine(p.ID)
	if err != nil {
		return err
	}
	writes := cgroup.CPUSet(&runtimeapi.LinuxContainerResources{CpusetCpus: cpus.String(), CpusetMems: mems.String()})
	if err := o.machines.Cgroups().Apply(m.Definition.Cgroup, writes); err != nil {
		return fmt.Errorf("linux.resources.cpuset_cpus, cpuset_mems: bind the pod's machine to the CPUs %s and memory nodes %q: %w", cpus, mems,
			err)
	}
	return nil
}

// leave takes the CPUs of a container that has ended from its machine, unless another one has them too.
func (o *Backend) leave(p *sandbox.Pod) {
	pod, err := o.running(p.ID)
	if err == nil {
		err = o.place(pod, p, nil)
	}
	if err != nil {
		o.log.Debug("a pod's machine keeps its CPUs", "pod", p.ID, "err", err)
	}
}

type grantedSets struct{ cpus, mems cpuset.CPUSet }

func (g grant) parse() (s grantedSets, err error) {
	if s.cpus, err = cpuset.Parse(g.CPUs); err != nil {
		return s, fmt.Errorf("linux.resources.cpuset_cpus: %w", err)
	}
	if s.mems, err = cpuset.Parse(g.Mems); err != nil {
		return s, fmt.Errorf("linux.resources.cpuset_mems: %w", err)
	}
	return s, nil
}
