package cgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Write describes one write to a cgroup's file, which sets a limit.
type Write struct {
	Controller, File, Value string
	// Lifts means that the value is no limit. The write is then unnecessary if the kernel lacks the file.
	Lifts bool
}

// Limits returns what to write to limit a cgroup to the given resources plus the given overhead. A resource of 0 leaves
// the cgroup's limit unchanged, and -1 lifts it. The overhead's CPU quota is added only if its CPU period equals that
// of res.
func (g Tree) Limits(res, over *runtimeapi.LinuxContainerResources) (w []Write) {
	number := func(v int64) string { return strconv.FormatInt(v, 10) }
	switch v := res.GetMemoryLimitInBytes(); {
	case v > 0:
		w = append(w, Write{Controller: "memory", File: g.memoryFile(), Value: number(v + over.GetMemoryLimitInBytes())})
	case v < 0:
		w = append(w, Write{Controller: "memory", File: g.memoryFile(), Value: g.unlimited(), Lifts: true})
	}
	w = append(w, g.quota(res, over)...)
	if v := res.GetCpuShares(); v > 0 {
		v = min(max(v+over.GetCpuShares(), 2), 262144)
		if g.V2 {
			// Like the OCI runtimes, map [2, 262144] to [1, 10000].
			w = append(w, Write{Controller: "cpu", File: "cpu.weight", Value: number(1 + ((v-2)*9999)/262142)})
		} else {
			w = append(w, Write{Controller: "cpu", File: "cpu.shares", Value: number(v)})
		}
	}
	return w
}

// quota returns what to write to limit a cgroup's CPU time; see Limits.
func (g Tree) quota(res, over *runtimeapi.LinuxContainerResources) []Write {
	v, period := res.GetCpuQuota(), res.GetCpuPeriod()
	if v == 0 {
		return nil
	}
	if v < 0 {
		file := "cpu.cfs_quota_us"
		if g.V2 {
			file = "cpu.max"
		}
		return []Write{{Controller: "cpu", File: file, Value: g.unlimited(), Lifts: true}}
	}
	if period <= 0 {
		period = 100_000
	}
	if over.GetCpuPeriod() == period {
		v += over.GetCpuQuota()
	}
	if g.V2 {
		return []Write{{Controller: "cpu", File: "cpu.max", Value: fmt.Sprint(v, period)}}
	}
	return []Write{
		{Controller: "cpu", File: "cpu.cfs_period_us", Value: fmt.Sprint(period)},
		{Controller: "cpu", File: "cpu.cfs_quota_us", Value: fmt.Sprint(v)},
	}
}

// unlimited is the value that means no limit.
func (g Tree) unlimited() string {
	if g.V2 {
		return "max"
	}
	return "-1"
}

func (g Tree) memoryFile() string {
	if g.V2 {
		return "memory.max"
	}
	return "memory.limit_in_bytes"
}

// TaskLimit returns what to write to limit the number of processes and threads in a cgroup; without a limit, to lift the limit.
func (g Tree) TaskLimit(limit *specs.LinuxPids) []Write {
	w := Write{Controller: "pids", File: "pids.max", Value: "max", Lifts: true}
	if limit != nil && limit.Limit != nil && *limit.Limit > 0 {
		w.Value, w.Lifts = strconv.FormatInt(*limit.Limit, 10), false
	}
	return []Write{w}
}

// CPUSet returns what to write to bind a cgroup to the CPUs and memory nodes in res.
func CPUSet(res *runtimeapi.LinuxContainerResources) (w []Write) {
	if v := res.GetCpusetCpus(); v != "" {
		w = append(w, Write{Controller: "cpuset", File: "cpuset.cpus", Value: v})
	}
	if v := res.GetCpusetMems(); v != "" {
		w = append(w, Write{Controller: "cpuset", File: "cpuset.mems", Value: v})
	}
	return w
}

// MemoryLimit returns a cgroup's own limit on memory, in bytes; 0 means no limit.
func (g Tree) MemoryLimit(dir string) (uint64, error) {
	raw, err := os.ReadFile(filepath.Join(g.Roots[g.Hierarchy("memory")], dir, g.memoryFile()))
	if err != nil {
		return 0, fmt.Errorf("read the memory limit: %w", err)
	}
	text := strings.TrimSpace(string(raw))
	if text == "max" {
		return 0, nil
	}
	limit, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read the memory limit: %w", err)
	}
	if limit > noMachineHas {
		return 0, nil
	}
	return limit, nil
}

// noMachineHas is more bytes than any machine has. If there is no limit, cgroup v1 shows an even larger number: the
// largest possible number of bytes in whole pages.
const noMachineHas = 1 << 60
