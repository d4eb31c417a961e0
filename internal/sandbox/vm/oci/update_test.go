package oci

import (
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/resources"
)

func withMemory(mib int64) *runtimeapi.ContainerConfig {
	return &runtimeapi.ContainerConfig{LogPath: "c.log",
		Linux: &runtimeapi.LinuxContainerConfig{Resources: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: mib << 20}}}
}

func podWith(res *runtimeapi.LinuxContainerResources) *sandbox.Pod {
	return &sandbox.Pod{ID: "p", Config: &runtimeapi.PodSandboxConfig{
		Linux: &runtimeapi.LinuxPodSandboxConfig{Resources: res}, DnsConfig: &runtimeapi.DNSConfig{Servers: []string{"10.0.0.10"}},
	}}
}

// TestResizeBeyondTheMachine: a container gets no memory limit that is more than its machine has for containers. A limit that
// was too high from the beginning does not prevent other changes.
func TestResizeBeyondTheMachine(t *testing.T) {
	var saw []*runtimeapi.LinuxContainerResources
	guest := sawResources(&saw)
	r := newRig(t, guest) // its machine was started with 256 MiB for containers
	for _, c := range []struct {
		pod, limit int64 // in MiB
		refused    bool
	}{
		{256, 128, false}, {256, 256, false}, {256, 257, true}, {512, 257, true}, {128, 129, true}, {512, 200, false}, {256, -1, false},
	} {
		p := podWith(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: c.pod << 20})
		calls := guest.called(guestapi.MethodUpdate)
		if err := r.handle.Set(func(s *state) { s.Granted.Memory = 64 << 20 }); err != nil {
			t.Fatal(err)
		}
		r.container.Config = withMemory(c.limit)
		err := r.UpdateContainer(t.Context(), p, r.container)
		if refused := errdefs.IsNotImplemented(err) &&
			strings.Contains(err.Error(), "linux.resources.memory_limit_in_bytes"); refused != c.refused || !refused && err != nil {
			t.Errorf("limit of %d MiB in a pod with %d: got error %v, want refused %t", c.limit, c.pod, err, c.refused)
		}
		if asked := guest.called(guestapi.MethodUpdate) > calls; asked == c.refused {
			t.Errorf("limit of %d MiB in a pod with %d: the guest was asked %t", c.limit, c.pod, asked)
		}
	}
	if err := r.handle.Set(func(s *state) { s.Granted.Memory = 1 << 30 }); err != nil {
		t.Fatal(err)
	}
	r.container.Config = withMemory(1024)
	r.container.Config.Linux.Resources.CpuShares = 77
	if err := r.UpdateContainer(t.Context(), podWith(nil), r.container); err != nil {
		t.Errorf("shares of a container whose limit was too high from the beginning: %v", err)
	}
}

// TestResizeOfPodKeepsMemory: a pod whose machine cannot have the memory gets the CPU time, on the node and in the guest.
func TestResizeOfPodKeepsMemory(t *testing.T) {
	var saw []*runtimeapi.LinuxContainerResources
	r := newRig(t, sawResources(&saw))
	read := r.withCgroup(t)
	quota := func() string {
		if r.machines.cgroups.V2 {
			return strings.Fields(read("cpu", "cpu.max"))[0]
		}
		return read("cpu", "cpu.cfs_quota_us")
	}
	memory := func() uint64 {
		limit, err := r.machines.cgroups.MemoryLimit(r.machines.machine.Definition.Cgroup)
		if err != nil {
			t.Fatal(err)
		}
		return limit - r.cfg.VM.MemoryOverhead - resources.GuestOverhead
	}
	for _, c := range []struct {
		limit, quota int64
		kept         bool
		want         uint64
	}{{256, 50_000, false, 256}, {512, 70_000, true, 256}, {128, 60_000, false, 128}, {512, 80_000, true, 128}} {
		p := podWith(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: c.limit << 20, CpuQuota: c.quota, CpuPeriod: 100_000})
		err := r.UpdateSandbox(t.Context(), p)
		if kept := errors.Is(err, sandbox.ErrMemoryKept) && errdefs.IsNotImplemented(err); kept != c.kept || !kept && err != nil {
			t.Errorf("%d MiB: got error %v, want the memory kept: %t", c.limit, err, c.kept)
		}
		if quota() != fmt.Sprint(c.quota) || memory() != c.want<<20 {
			t.Errorf("%d MiB: the machine has a quota of %s and %d bytes, want %d and %d MiB", c.limit, quota(), memory(), c.quota, c.want)
		}
		inGuest := saw[len(saw)-1]
		if want := c.limit << 20; inGuest.CpuQuota != c.quota || !c.kept && inGuest.MemoryLimitInBytes != want ||
			c.kept && inGuest.MemoryLimitInBytes != 0 {
			t.Errorf("%d MiB: got %v in the guest", c.limit, inGuest)
		}
	}
}

// TestWarnOfMemory: a container without a memory limit in a machine that has the memory of the others' limits is worth a
// warning.
func TestWarnOfMemory(t *testing.T) {
	for name, c := range map[string]struct {
		pod, container int64
		warns          bool
	}{"beside limits": {64, 0, true}, "with its own": {64, 32, false}, "no limits": {0, 0, false}} {
		var log strings.Builder
		r := newRig(t, sawResources(new([]*runtimeapi.LinuxContainerResources)))
		r.Backend.log = slog.New(slog.NewTextHandler(&log, nil))
		p := podWith(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: c.pod << 20})
		if _, err := r.CreateContainer(t.Context(), p, &sandbox.Container{ID: "d", ImageID: "i", Config: withMemory(c.container)}); err != nil {
			t.Fatal(err)
		}
		if warns := strings.Contains(log.String(), "level=WARN") && strings.Contains(log.String(), "64Mi"); warns != c.warns {
			t.Errorf("%s: got log %q, want a warning: %t", name, log.String(), c.warns)
		}
	}
}
