package resources

import (
	"errors"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cgroup"
)

// Cgroups are the cgroups of machines.
type Cgroups struct {
	cgroup.Tree
	// Overhead is the memory in bytes that a hypervisor has in addition to its guest's.
	Overhead uint64
}

// Limit applies a container's limits to a cgroup. The memory limit is the guest's memory plus the hypervisor's
// overhead.
//
// With cgroup v1, no cgroup has more CPU time than its parent. A kubelet reports a pod's new limit before it raises that of
// the pod's cgroup. The machine's cgroup then gets no limit of its own, and the parent's limit applies, now and later.
func (c Cgroups) Limit(dir string, memory uint64, res *runtimeapi.LinuxContainerResources) error {
	own := &runtimeapi.LinuxContainerResources{
		MemoryLimitInBytes: int64(memory), CpuQuota: res.GetCpuQuota(), CpuPeriod: res.GetCpuPeriod(), CpuShares: res.GetCpuShares(),
	}
	apply := func() error {
		writes := c.Limits(own, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: int64(c.Overhead)})
		return c.Apply(dir, append(writes, cgroup.CPUSet(res)...))
	}
	err := apply()
	if own.CpuQuota > 0 && errors.Is(err, unix.EINVAL) {
		own.CpuQuota = -1
		err = apply()
	}
	return err
}

// Memory returns the memory in bytes that the running machine in a cgroup may use, or 0 if it is not limited.
func (c Cgroups) Memory(dir string) (uint64, error) {
	limit, err := c.MemoryLimit(dir)
	if err != nil {
		return 0, err
	}
	return limit - min(limit, c.Overhead), nil
}
