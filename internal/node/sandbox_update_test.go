package node_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/test/fake"
)

// fixed is a backend whose pods cannot have more memory. It counts the updates.
type fixed struct {
	*fake.Backend
	updates *int
}

func (f fixed) UpdateSandbox(context.Context, *sandbox.Pod) error {
	*f.updates++
	return fmt.Errorf("%w: %w", sandbox.ErrMemoryKept, errdefs.ErrNotImplemented)
}

// TestResizeKeepsMemory: if only a pod's memory cannot change, the record has the other resources, and nothing is undone.
func TestResizeKeepsMemory(t *testing.T) {
	updates := 0
	b := openWith(t, t.TempDir(), "linux", sandbox.Capabilities{}, func(f *fake.Backend) sandbox.Backend { return fixed{f, &updates} })
	config := podConfig("p")
	config.Linux = &runtimeapi.LinuxPodSandboxConfig{Resources: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 20,
		CpuQuota: 10_000}}
	pod := b.run(t, "", config)
	err := b.UpdateSandbox(t.Context(), pod, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 2 << 20, CpuQuota: 20_000}, nil)
	if !errdefs.IsNotImplemented(err) || updates != 1 {
		t.Errorf("UpdateSandbox: got error %v after %d updates, want Unimplemented after one", err, updates)
	}
	p, err := b.Pod(pod)
	must(t, err)
	if res := p.Config.Linux.Resources; res.MemoryLimitInBytes != 1<<20 || res.CpuQuota != 20_000 || p.Resizing {
		t.Errorf("record: got %v, resizing %t; want the new quota, and the old memory", res, p.Resizing)
	}
}
