package sandboxtest

import (
	"encoding/json"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// cpu is a limit of CPU time that every kind of pod supports.
func cpu(quota int64) *runtimeapi.LinuxContainerResources {
	return &runtimeapi.LinuxContainerResources{CpuPeriod: 100_000, CpuQuota: quota, CpuShares: 2 + quota/100}
}

// resize: a created and a running container and their pod get new resources, which are reported, and survive the death
// of the daemon. Refused ones change nothing.
func (c client) resize() {
	pod, podConfig := c.pod()
	id := c.create(pod, podConfig, c.container("c", Runs))
	c.must(c.update(id, cpu(50_000)))
	c.wantCPU(id, 50_000)
	c.must(c.start(id))
	c.wantCPU(id, 50_000)
	c.must(c.updatePod(pod, cpu(80_000), &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 32 << 20}))
	c.must(c.update(id, cpu(70_000)))
	c.must(c.update(id, cpu(60_000)))
	for what, res := range map[string]*runtimeapi.LinuxContainerResources{"period": {CpuPeriod: -5}, "memory": {MemoryLimitInBytes: -5}} {
		c.wantCode(c.update(id, res), codes.InvalidArgument, "update of the container with a wrong "+what)
	}
	c.wantCode(c.updatePod(pod, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: -5}, nil), codes.InvalidArgument,
		"update of the pod with wrong memory")
	c.wantCode(c.updatePod(unknown, nil, nil), codes.NotFound, "update of an unknown pod")
	if c.Restart != nil {
		c.Restart(c.T)
	}
	c.wantCPU(id, 60_000)
	linux := c.podLinux(pod)
	if linux.GetResources().GetCpuQuota() != 80_000 || linux.GetOverhead().GetMemoryLimitInBytes() != 32<<20 {
		c.Errorf("pod's resources: got %v, want those of the update", linux)
	}
	c.must(c.stop(id, 5))
	c.wantCode(c.update(id, cpu(50_000)), codes.FailedPrecondition, "update of a stopped container")
	c.must(c.stopPod(pod))
	c.wantCode(c.updatePod(pod, cpu(50_000), nil), codes.FailedPrecondition, "update of a stopped pod")
}

func (c client) update(id string, res *runtimeapi.LinuxContainerResources) error {
	_, err := c.cri().UpdateContainerResources(c.ctx(), &runtimeapi.UpdateContainerResourcesRequest{ContainerId: id, Linux: res})
	return err
}

func (c client) updatePod(id string, res, overhead *runtimeapi.LinuxContainerResources) error {
	_, err := c.cri().UpdatePodSandboxResources(c.ctx(),
		&runtimeapi.UpdatePodSandboxResourcesRequest{PodSandboxId: id, Resources: res, Overhead: overhead})
	return err
}

func (c client) wantCPU(id string, quota int64) {
	c.Helper()
	if got := c.status(id).GetResources().GetLinux(); got.GetCpuQuota() != quota || got.GetCpuShares() != cpu(quota).CpuShares {
		c.Errorf("resources of the container: got %v, want %v", got, cpu(quota))
	}
}

// podLinux returns the pod's resources as verbose status reports them.
func (c client) podLinux(pod string) *runtimeapi.LinuxPodSandboxConfig {
	c.Helper()
	resp, err := c.cri().PodSandboxStatus(c.ctx(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pod, Verbose: true})
	c.must(err)
	var info struct {
		Config struct {
			Linux *runtimeapi.LinuxPodSandboxConfig
		}
	}
	if err := json.Unmarshal([]byte(resp.Info["info"]), &info); err != nil {
		c.Fatalf("verbose status %s: %v", resp.Info["info"], err)
	}
	return info.Config.Linux
}
