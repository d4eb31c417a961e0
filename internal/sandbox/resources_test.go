package sandbox_test

import (
	"testing"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

func TestResources(t *testing.T) {
	type res = runtimeapi.LinuxContainerResources
	for what, c := range map[string]struct{ pod, container, want *res }{
		"nothing":            {nil, nil, nil},
		"only the container": {nil, &res{MemoryLimitInBytes: 5}, &res{MemoryLimitInBytes: 5}},
		"only the pod": {
			&res{MemoryLimitInBytes: 7, CpuQuota: 1000, CpuPeriod: 2000, CpuShares: 9}, nil,
			&res{MemoryLimitInBytes: 7, CpuQuota: 1000, CpuPeriod: 2000},
		},
		"the container's own limits win": {
			&res{MemoryLimitInBytes: 7, CpuQuota: 1000}, &res{MemoryLimitInBytes: 5, CpuQuota: -1, CpuShares: 3},
			&res{MemoryLimitInBytes: 5, CpuQuota: -1, CpuShares: 3},
		},
		"one of each": {
			&res{MemoryLimitInBytes: 7, CpuQuota: 1000}, &res{CpuQuota: 500, CpuPeriod: 800},
			&res{MemoryLimitInBytes: 7, CpuQuota: 500, CpuPeriod: 800},
		},
		"a pod without a limit": {&res{MemoryLimitInBytes: -1, CpuQuota: -1}, &res{CpuShares: 3}, &res{CpuShares: 3}},
	} {
		pod := &sandbox.Pod{Config: &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{Resources: c.pod}}}
		container := &sandbox.Container{Config: &runtimeapi.ContainerConfig{Linux: &runtimeapi.LinuxContainerConfig{Resources: c.container}}}
		if got := sandbox.Resources(pod, container); !proto.Equal(got, c.want) {
			t.Errorf("%s: Resources = %v, want %v", what, got, c.want)
		}
	}
}
