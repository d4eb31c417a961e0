package linux

import (
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// cgroups names the cgroups of pods and containers in the host's tree:
//
//	cgroupfs   <pod's cgroup>/tripod-<container>
//	systemd    <pod's slice>/tripod-<container>.scope
type cgroups struct{ cgroup.Tree }

func openCgroups(driver, parent string) (cgroups, error) {
	tree, err := cgroup.Open(driver, parent)
	return cgroups{tree}, err
}

// pod returns the path of the pod's cgroup, which is the parent of its containers' cgroups. The second result reports
// whether Tripod creates and removes that cgroup.
func (g cgroups) pod(p *sandbox.Pod) (string, bool) {
	return g.Pod(p.Config.GetLinux().GetCgroupParent(), p.ID)
}

// container returns the container's cgroup in the OCI runtime's notation (cgroupsPath) and its path in the hierarchies.
func (g cgroups) container(p *sandbox.Pod, id string) (oci, dir string) {
	pod, _ := g.pod(p)
	if g.Driver == cgroup.DriverSystemd {
		return path.Base(pod) + ":" + strings.TrimSuffix(cgroup.Mark, "-") + ":" + id, path.Join(pod, cgroup.Mark+id+".scope")
	}
	dir = path.Join(pod, cgroup.Mark+id)
	return dir, dir
}

// crunCgroup is the cgroup that crun makes in a container's scope on v2, for the container's processes and limits.
const crunCgroup = "container"

// limitScope sets the limits of a container on its scope, if it has one. crun sets them on a cgroup below only, where those who
// look at the scope do not see them. systemd may reset what is written to the files of the scope itself.
func (g cgroups) limitScope(dir string, res *specs.LinuxResources) error {
	if g.Driver != cgroup.DriverSystemd || !g.V2 || res == nil {
		return nil
	}
	var l runtimeapi.LinuxContainerResources
	if m := res.Memory; m != nil && m.Limit != nil {
		l.MemoryLimitInBytes = *m.Limit
	}
	if c := res.CPU; c != nil {
		l.CpusetCpus, l.CpusetMems = c.Cpus, c.Mems
		if c.Quota != nil {
			l.CpuQuota = *c.Quota
		}
		if c.Period != nil {
			l.CpuPeriod = int64(*c.Period)
		}
		if c.Shares != nil {
			l.CpuShares = int64(*c.Shares)
		}
	}
	return g.Apply(dir, slices.Concat(g.Limits(&l, nil), swapLimit(res.Memory), cgroup.CPUSet(&l), g.TaskLimit(res.Pids)))
}

// swapLimit returns what to write to limit swap on v2, which counts it apart from memory; the OCI's number limits both together.
func swapLimit(m *specs.LinuxMemory) []cgroup.Write {
	switch {
	case m == nil || m.Swap == nil:
		return nil
	case *m.Swap < 0 || m.Limit == nil:
		return []cgroup.Write{{Controller: "memory", File: "memory.swap.max", Value: "max", Lifts: true}}
	}
	return []cgroup.Write{{Controller: "memory", File: "memory.swap.max", Value: strconv.FormatInt(max(*m.Swap-*m.Limit, 0), 10)}}
}

// limit sets the limits of the whole pod on the pod's own cgroup, which it creates if necessary. It does nothing if the
// request names a parent cgroup: a caller that names a parent, such as the kubelet, sets the limits on that parent. On v1, systemd
// would not keep them.
func (g cgroups) limit(p *sandbox.Pod) error {
	linux := p.Config.GetLinux()
	dir, ours := g.pod(p)
	if !ours || linux.GetCgroupParent() != "" || g.Driver == cgroup.DriverSystemd && !g.V2 {
		return nil
	}
	return g.Apply(dir, g.Limits(linux.GetResources(), linux.GetOverhead()))
}
