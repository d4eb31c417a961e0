package node

import (
	"testing"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestMergeResources(t *testing.T) {
	old := &runtimeapi.LinuxContainerResources{
		CpuShares: 2, CpuQuota: 5000, MemoryLimitInBytes: 100, OomScoreAdj: 5, CpusetCpus: "0",
		HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB", Limit: 1}, {PageSize: "1GB", Limit: 2}},
		Unified:        map[string]string{"memory.high": "1", "memory.min": "2"},
	}
	before := proto.CloneOf(old)
	one := &runtimeapi.LinuxContainerResources{CpuShares: 3, Unified: map[string]string{"a.b": "c"}}
	for what, c := range map[string]struct {
		old, change, want *runtimeapi.LinuxContainerResources
	}{
		"fields that are set win": {
			old, &runtimeapi.LinuxContainerResources{
				CpuQuota: -1, MemoryLimitInBytes: 200, MemorySwapLimitInBytes: 300, CpusetMems: "0",
				HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB", Limit: 9}}, Unified: map[string]string{"memory.high": "7"},
			}, &runtimeapi.LinuxContainerResources{
				CpuShares: 2, CpuQuota: -1, MemoryLimitInBytes: 200, MemorySwapLimitInBytes: 300, OomScoreAdj: 5, CpusetCpus: "0", CpusetMems: "0",
				HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "1GB", Limit: 2}, {PageSize: "2MB", Limit: 9}},
				Unified:        map[string]string{"memory.high": "7", "memory.min": "2"},
			},
		},
		"nothing changes": {old, nil, before},
		"nothing was set": {nil, one, one},
	} {
		if got := MergeResources(c.old, c.change); !proto.Equal(got, c.want) {
			t.Errorf("%s: mergeResources = %v, want %v", what, got, c.want)
		}
	}
	if !proto.Equal(old, before) {
		t.Errorf("mergeResources changed its argument: got %v, want %v", old, before)
	}
}
