package spec

import (
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestResources(t *testing.T) {
	v2 := fullHost()
	v2.CgroupV2 = true
	noSwap := fullHost()
	noSwap.SwapAccounting = false
	noQuota := fullHost()
	noQuota.CPUQuota = false
	noHugetlb := fullHost()
	noHugetlb.Controllers["hugetlb"] = false
	bare := fullHost()
	bare.Controllers = nil

	for name, c := range map[string]struct {
		host Host
		res  *runtimeapi.LinuxContainerResources
		want specs.LinuxResources
	}{
		"nothing": {host: bare},
		"shares": {host: fullHost(), res: &runtimeapi.LinuxContainerResources{CpuShares: 2},
			want: specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: new(uint64(2))}}},
		"quota": {host: fullHost(), res: &runtimeapi.LinuxContainerResources{CpuQuota: 1000, CpuPeriod: 1000},
			want: specs.LinuxResources{CPU: &specs.LinuxCPU{Quota: new(int64(1000)), Period: new(uint64(1000))}}},
		"no quota": {host: fullHost(), res: &runtimeapi.LinuxContainerResources{CpuQuota: -5},
			want: specs.LinuxResources{CPU: &specs.LinuxCPU{}}},
		"period, no CFS": {host: noQuota, res: &runtimeapi.LinuxContainerResources{CpuPeriod: 100000},
			want: specs.LinuxResources{CPU: &specs.LinuxCPU{}}},
		"cpuset": {host: fullHost(), res: &runtimeapi.LinuxContainerResources{CpusetCpus: "0-2,7", CpusetMems: "0"},
			want: specs.LinuxResources{CPU: &specs.LinuxCPU{Cpus: "0-2,7", Mems: "0"}}},
		"memory": {host: fullHost(), res: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 9},
			want: specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: new(int64(9)), Swap: new(int64(9))}}},
		"memory, no swap": {host: noSwap, res: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 9},
			want: specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: new(int64(9))}}},
		"swap": {host: fullHost(), res: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 9, MemorySwapLimitInBytes: 12},
			want: specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: new(int64(9)), Swap: new(int64(12))}}},
		"swap unlimited": {host: fullHost(), res: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 9, MemorySwapLimitInBytes: -1},
			want: specs.LinuxResources{Memory: &specs.LinuxMemory{Limit: new(int64(9)), Swap: new(int64(-1))}}},
		"huge pages": {host: fullHost(),
			res:  &runtimeapi.LinuxContainerResources{HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB", Limit: 5}, {PageSize: "1Gi"}}},
			want: specs.LinuxResources{HugepageLimits: []specs.LinuxHugepageLimit{{Pagesize: "2MB", Limit: 5}, {Pagesize: "1GB"}}}},
		"zero, no hugetlb": {host: noHugetlb,
			res: &runtimeapi.LinuxContainerResources{HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB"}}}},
		"unified": {host: v2, res: &runtimeapi.LinuxContainerResources{Unified: map[string]string{"memory.high": "1"}},
			want: specs.LinuxResources{Unified: map[string]string{"memory.high": "1"}}},
		"v2 in terms of v1": {host: v2, res: &runtimeapi.LinuxContainerResources{CpuShares: 1024},
			want: specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: new(uint64(1024))}}},
		"oom score is apart": {host: bare, res: &runtimeapi.LinuxContainerResources{OomScoreAdj: -997}},
	} {
		got, err := Resources(c.res, c.host)
		require.NoError(t, err, name)
		assert.Equal(t, c.want, *got, name)
	}
}

func TestResourcesRefused(t *testing.T) {
	none := fullHost()
	none.Controllers, none.SwapAccounting = nil, false
	noSwap := fullHost()
	noSwap.SwapAccounting = false
	noQuota := fullHost()
	noQuota.CPUQuota = false
	v2 := fullHost()
	v2.CgroupV2 = true
	huge := func(size string, limit uint64) *runtimeapi.LinuxContainerResources {
		return &runtimeapi.LinuxContainerResources{HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: size, Limit: limit}}}
	}
	unified := func(key string) *runtimeapi.LinuxContainerResources {
		return &runtimeapi.LinuxContainerResources{Unified: map[string]string{key: "1"}}
	}
	for _, c := range []struct {
		host  Host
		res   *runtimeapi.LinuxContainerResources
		class error
		field string
	}{
		{fullHost(), &runtimeapi.LinuxContainerResources{CpuShares: -1}, errInvalid, "cpu_shares"},
		{fullHost(), &runtimeapi.LinuxContainerResources{CpuPeriod: 999}, errInvalid, "cpu_period"},
		{fullHost(), &runtimeapi.LinuxContainerResources{CpuPeriod: 1_000_001}, errInvalid, "cpu_period"},
		{fullHost(), &runtimeapi.LinuxContainerResources{CpuQuota: 999}, errInvalid, "cpu_quota"},
		{fullHost(), &runtimeapi.LinuxContainerResources{CpusetCpus: "3-1"}, errInvalid, "cpuset_cpus"},
		{fullHost(), &runtimeapi.LinuxContainerResources{CpusetMems: "a"}, errInvalid, "cpuset_mems"},
		{fullHost(), &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: -2}, errInvalid, "memory_limit_in_bytes"},
		{fullHost(), &runtimeapi.LinuxContainerResources{MemorySwapLimitInBytes: 5}, errInvalid, "memory_swap_limit_in_bytes"},
		{fullHost(), &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 9, MemorySwapLimitInBytes: 5}, errInvalid,
			"memory_swap_limit_in_bytes"},
		{fullHost(), &runtimeapi.LinuxContainerResources{MemorySwapLimitInBytes: -2}, errInvalid, "memory_swap_limit_in_bytes"},
		{fullHost(), &runtimeapi.LinuxContainerResources{OomScoreAdj: 1001}, errInvalid, "oom_score_adj"},
		{fullHost(), huge("3MB", 1), errInvalid, "hugepage_limits"},
		{fullHost(), huge("junk", 1), errInvalid, "hugepage_limits"},
		{fullHost(), huge("99999999999999999E", 1), errInvalid, "hugepage_limits"},
		{fullHost(), &runtimeapi.LinuxContainerResources{HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB"}, {PageSize: "2048KB"}}},
			errInvalid, "twice"},
		{v2, unified("cgroup.procs"), errInvalid, "unified"},
		{v2, unified("memory/../x"), errInvalid, "unified"},
		{v2, unified("memory"), errInvalid, "unified"},
		{v2, unified("rdma.max"), errUnsupported, "rdma"},
		{fullHost(), unified("memory.high"), errUnsupported, "unified"},
		{none, &runtimeapi.LinuxContainerResources{CpuShares: 2}, errUnsupported, "cpu_shares"},
		{none, &runtimeapi.LinuxContainerResources{CpusetCpus: "0"}, errUnsupported, "cpuset"},
		{none, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 9}, errUnsupported, "memory"},
		{none, huge("2MB", 1), errUnsupported, "hugepage_limits"},
		{noQuota, &runtimeapi.LinuxContainerResources{CpuQuota: 5000}, errUnsupported, "cpu_quota"},
		{noSwap, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 9, MemorySwapLimitInBytes: 12}, errUnsupported,
			"memory_swap_limit_in_bytes"},
	} {
		_, err := Resources(c.res, c.host)
		requireRefused(t, err, c.class, c.field)
		container := testContainer()
		container.Config.Linux.Resources = c.res
		requireRefused(t, Validate(testPod(), container, c.host), c.class, c.field)
	}
}

func TestOOMScoreIsClamped(t *testing.T) {
	h := fullHost()
	in := testInput(t)
	in.Container.Config.Linux.Resources.OomScoreAdj = -997
	s, _ := build(t, in, h)
	assert.Equal(t, -997, *s.Process.OOMScoreAdj)
	h.OwnOOMScore = 100
	s, _ = build(t, in, h)
	assert.Equal(t, 100, *s.Process.OOMScoreAdj)
	assert.Equal(t, 100, *Pause(PauseInput{Pod: testPod(), Host: h}).Process.OOMScoreAdj)
}
