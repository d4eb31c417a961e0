package spec

import (
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The kernel's limits for CFS bandwidth, in microseconds (Documentation/scheduler/sched-bwc.rst), and for oom_score_adj
// (proc_pid_oom_score_adj(5)).
const (
	minCPUQuota  = 1_000
	minCPUPeriod = 1_000
	maxCPUPeriod = 1_000_000
	maxOOMScore  = 1000
)

// Resources converts a container's limits to the OCI form, to create the container or to update it. It returns
// errdefs.ErrNotImplemented for a limit whose controller the host lacks, and errdefs.ErrInvalidArgument for a value
// that no kernel accepts. Build handles oom_score_adj, which belongs to the process rather than the cgroup.
func Resources(res *runtimeapi.LinuxContainerResources, h Host) (*specs.LinuxResources, error) {
	if err := checkOOMScore(res); err != nil {
		return nil, err
	}
	r := &specs.LinuxResources{}
	for _, add := range []func(*specs.LinuxResources, *runtimeapi.LinuxContainerResources, Host) error{
		addCPU, addCpuset, addMemory, addHugepages, addUnified,
	} {
		if err := add(r, res, h); err != nil {
			return nil, err
		}
	}
	return r, nil
}

func addCPU(r *specs.LinuxResources, res *runtimeapi.LinuxContainerResources, h Host) error {
	const field = "linux.resources.cpu_"
	shares, quota, period := res.GetCpuShares(), res.GetCpuQuota(), res.GetCpuPeriod()
	if shares == 0 && quota == 0 && period == 0 {
		return nil
	}
	switch {
	case shares < 0:
		return invalid(field+"shares", "%d is negative", shares)
	case period != 0 && (period < minCPUPeriod || period > maxCPUPeriod):
		return invalid(field+"period", "%d µs is not between %d and %d", period, minCPUPeriod, maxCPUPeriod)
	case quota > 0 && quota < minCPUQuota:
		return invalid(field+"quota", "%d µs is less than the kernel's minimum of %d", quota, minCPUQuota)
	case !h.Controllers["cpu"]:
		return unsupported(field+"shares", "the node has no cpu controller")
	case quota > 0 && !h.CPUQuota:
		return unsupported(field+"quota", "the kernel of this node cannot limit CPU time (CONFIG_CFS_BANDWIDTH)")
	}
	r.CPU = &specs.LinuxCPU{}
	if shares > 0 {
		r.CPU.Shares = new(uint64(shares))
	}
	// A negative quota means no limit, which is the default of a new cgroup. A negative quota is not passed on, because
	// crun 1.8 would write it to cgroup v1 as a huge number, and the kernel would reject that number.
	if quota > 0 {
		r.CPU.Quota = new(quota)
	}
	if period > 0 && h.CPUQuota {
		r.CPU.Period = new(uint64(period))
	}
	return nil
}

func addCpuset(r *specs.LinuxResources, res *runtimeapi.LinuxContainerResources, h Host) error {
	const field = "linux.resources.cpuset_"
	cpus, mems := res.GetCpusetCpus(), res.GetCpusetMems()
	if cpus == "" && mems == "" {
		return nil
	}
	if err := checkIDList(field+"cpus", cpus); err != nil {
		return err
	}
	if err := checkIDList(field+"mems", mems); err != nil {
		return err
	}
	if !h.Controllers["cpuset"] {
		return unsupported(field+"cpus", "the node has no cpuset controller")
	}
	if r.CPU == nil {
		r.CPU = &specs.LinuxCPU{}
	}
	r.CPU.Cpus, r.CPU.Mems = cpus, mems
	return nil
}

// checkIDList checks that a list has the list format of cpuset(7), such as 0-4,9.
func checkIDList(field, list string) error {
	if list == "" {
		return nil
	}
	for part := range strings.SplitSeq(list, ",") {
		first, last, isRange := strings.Cut(part, "-")
		if !isRange {
			last = first
		}
		a, err1 := strconv.ParseUint(first, 10, 16)
		b, err2 := strconv.ParseUint(last, 10, 16)
		if err1 != nil || err2 != nil || b < a {
			return invalid(field, "%q is not a list like 0-4,9", list)
		}
	}
	return nil
}

// addMemory limits memory. If the request has no swap limit, addMemory forbids swap. The OCI's memory.swap limits
// memory and swap together.
func addMemory(r *specs.LinuxResources, res *runtimeapi.LinuxContainerResources, h Host) error {
	const field = "linux.resources.memory_"
	limit, swap := res.GetMemoryLimitInBytes(), res.GetMemorySwapLimitInBytes()
	if limit == 0 && swap == 0 {
		return nil
	}
	switch {
	case limit < -1:
		return invalid(field+"limit_in_bytes", "%d is negative", limit)
	case swap < -1:
		return invalid(field+"swap_limit_in_bytes", "%d is negative", swap)
	case swap > 0 && limit <= 0:
		return invalid(field+"swap_limit_in_bytes", "needs a memory limit too, which it includes")
	case swap > 0 && swap < limit:
		return invalid(field+"swap_limit_in_bytes", "%d is less than the memory limit of %d, which it includes", swap, limit)
	case !h.Controllers["memory"]:
		return unsupported(field+"limit_in_bytes", "the node has no memory controller (boot it with cgroup_enable=memory)")
	case swap > 0 && !h.SwapAccounting:
		return unsupported(field+"swap_limit_in_bytes", "the node does not account for swap (boot it with swapaccount=1)")
	}
	r.Memory = &specs.LinuxMemory{}
	if limit != 0 {
		r.Memory.Limit = &limit
		if swap == 0 {
			swap = limit
		}
	}
	if swap != 0 && h.SwapAccounting {
		r.Memory.Swap = &swap
	}
	return nil
}

// addHugepages ignores limits of zero if the hugetlb controller is missing, because kubelets send a limit for every
// page size.
func addHugepages(r *specs.LinuxResources, res *runtimeapi.LinuxContainerResources, h Host) error {
	const field = "linux.resources.hugepage_limits"
	seen := map[string]bool{}
	for _, limit := range res.GetHugepageLimits() {
		size, err := parsePageSize(limit.GetPageSize())
		name := pageSizeName(size)
		switch {
		case err != nil:
			return invalid(field, "page size %q does not look like 2MB or 1GB", limit.GetPageSize())
		case seen[name]:
			return invalid(field, "page size %s is given twice", name)
		case !slices.Contains(h.HugepageSizes, name):
			return invalid(field, "the node has no huge pages of %s (it has %s)", name, strings.Join(h.HugepageSizes, ", "))
		case !h.Controllers["hugetlb"] && limit.GetLimit() > 0:
			return unsupported(field, "the node has no hugetlb controller")
		case !h.Controllers["hugetlb"]:
			continue
		}
		seen[name] = true
		r.HugepageLimits = append(r.HugepageLimits, specs.LinuxHugepageLimit{Pagesize: name, Limit: limit.GetLimit()})
	}
	return nil
}

// pageUnits are the units of a page size, in steps of 1024.
const pageUnits = "KMGTPE"

// parsePageSize converts a size such as 64KB, 2MB, 1GB or 2Mi to bytes.
func parsePageSize(s string) (uint64, error) {
	number := strings.TrimRight(s, pageUnits+"iB")
	n, err := strconv.ParseUint(number, 10, 64)
	if err != nil {
		return 0, err
	}
	unit := strings.TrimSuffix(strings.TrimSuffix(s[len(number):], "B"), "i")
	if unit == "" {
		return n, nil
	}
	i := strings.Index(pageUnits, unit)
	if i < 0 || len(unit) != 1 || n > math.MaxUint64>>(10*(i+1)) {
		return 0, strconv.ErrSyntax
	}
	return n << (10 * (i + 1)), nil
}

// pageSizeName formats bytes as the CRI and the kernel's file names do: in the largest unit that leaves an integer.
func pageSizeName(size uint64) string {
	unit := -1
	for size >= 1024 && size%1024 == 0 && unit+1 < len(pageUnits) {
		size >>= 10
		unit++
	}
	if unit < 0 {
		return strconv.FormatUint(size, 10) + "B"
	}
	return strconv.FormatUint(size, 10) + pageUnits[unit:unit+1] + "B"
}

// addUnified passes on the values of cgroup v2 files. The files must belong to a controller that the host has;
// cgroup.procs and other cgroup.* files are rejected.
func addUnified(r *specs.LinuxResources, res *runtimeapi.LinuxContainerResources, h Host) error {
	const field = "linux.resources.unified"
	if len(res.GetUnified()) == 0 {
		return nil
	}
	if !h.CgroupV2 {
		return unsupported(field, "the node has cgroup v1")
	}
	for key, value := range res.GetUnified() {
		controller, file, ok := strings.Cut(key, ".")
		switch {
		case !ok, file == "", strings.ContainsAny(key, "/\x00"), controller == "cgroup":
			return invalid(field, "%q is not the file of a controller", key)
		case !h.Controllers[controller]:
			return unsupported(field, "%q: the node has no %s controller", key, controller)
		}
		if err := checkText(field, value); err != nil {
			return err
		}
	}
	r.Unified = maps.Clone(res.GetUnified())
	return nil
}

func checkOOMScore(res *runtimeapi.LinuxContainerResources) error {
	if n := res.GetOomScoreAdj(); n < -maxOOMScore || n > maxOOMScore {
		return invalid("linux.resources.oom_score_adj", "%d is not between %d and %d", n, -maxOOMScore, maxOOMScore)
	}
	return nil
}

// oomScore returns the process's oom_score_adj. It is the requested value, but at least the lowest value that we can
// set. The result is never nil, so that no container inherits the daemon's protection.
func oomScore(res *runtimeapi.LinuxContainerResources, h Host) *int {
	return new(max(int(res.GetOomScoreAdj()), h.OwnOOMScore))
}
