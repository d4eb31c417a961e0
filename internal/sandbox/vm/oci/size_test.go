package oci

import (
	"slices"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/resources"
)

// grows lets the rig's machine grow to so many MiB and four CPUs.
func (r *rig) grows(mib uint64) {
	d := &r.machines.machine.Definition
	d.CPUs, d.Growth, r.machines.machine.CPUs = 1, &machine.Growth{Boot: resources.GuestBoot, Memory: mib << 20, CPUs: 4}, 1
}

// TestSize: what a kubelet sends is the sum of the limits that containers have, which does not limit a container without one.
// What others send is the pod's limit.
func TestSize(t *testing.T) {
	const standard = 128 // MiB
	type limits struct{ memory, quota int64 }
	for name, c := range map[string]struct {
		pod        limits
		kubelet    bool
		containers []limits
		want       machineSize
	}{
		"nothing":                   {limits{}, true, nil, machineSize{standard, 0, 0}},
		"no containers yet":         {limits{64, 50_000}, true, nil, machineSize{64, 50_000, 0}},
		"all limited":               {limits{192, 150_000}, true, []limits{{64, 50_000}, {128, 100_000}}, machineSize{192, 150_000, 2}},
		"one without limits":        {limits{64, 50_000}, true, []limits{{64, 50_000}, {}}, machineSize{64 + standard, -1, 1}},
		"one without, by hand":      {limits{64, 50_000}, false, []limits{{64, 50_000}, {}}, machineSize{64, 50_000, 1}},
		"a resize before the pod's": {limits{64, 50_000}, true, []limits{{256, 300_000}}, machineSize{256, 300_000, 3}},
		"no limit of the pod":       {limits{}, false, []limits{{256, 250_000}, {}}, machineSize{256 + standard, 0, 3}},
		"small containers":          {limits{}, false, []limits{{16, 0}}, machineSize{standard, 0, 0}},
		"lifted":                    {limits{0, -1}, true, []limits{{-1, -1}}, machineSize{standard, -1, 0}},
		"more than the machine can grow to": {limits{64, 0}, true, []limits{{64 << 10, 0}},
			machineSize{1024 - resources.GuestOverhead>>20, 0, 0}},
	} {
		r := newRig(t, &fakeGuest{})
		r.withCgroup(t)
		r.grows(1024)
		r.cfg.VM.DefaultMemory = standard << 20
		p := podWith(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: c.pod.memory << 20, CpuQuota: c.pod.quota, CpuPeriod: 100_000})
		if c.kubelet {
			p.Config.Linux.CgroupParent = "/kubepods/pod1"
		}
		changed := map[string]grant{}
		for i, l := range c.containers {
			id := "c" // which replaces what the rig has recorded of its container
			if i > 0 {
				id += string(rune('0' + i))
			}
			changed[id] = grant{Memory: max(l.memory<<20, -1), Quota: l.quota}
		}
		if len(changed) == 0 {
			if err := r.handle.Set(func(s *state) { s.Exit(s.StartedAt, 0, "", "") }); err != nil {
				t.Fatal(err)
			}
		}
		got := r.size(p, changed)
		got.memory >>= 20
		if got != c.want {
			t.Errorf("%s: got %+v, want %+v (memory in MiB)", name, got, c.want)
		}
	}
}

// TestFit: a machine grows for a container that its pod's limits do not cover, by memory, CPU time and CPUs. The guest learns
// of it. It does not shrink, and nothing happens, when the next container needs less.
func TestFit(t *testing.T) {
	guest := sawResources(new([]*runtimeapi.LinuxContainerResources))
	r := newRig(t, guest)
	read := r.withCgroup(t)
	r.grows(4096)
	p := podWith(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 256 << 20, CpuQuota: 50_000, CpuPeriod: 100_000})
	p.Config.Linux.CgroupParent = "/kubepods/pod1"
	if err := r.handle.Set(func(s *state) { s.Granted = grant{Memory: 256 << 20, Quota: 50_000} }); err != nil {
		t.Fatal(err)
	}
	create := func(id string, memory, quota int64) int {
		t.Helper()
		calls := guest.called(guestapi.MethodUpdatePod)
		config := &runtimeapi.ContainerConfig{LogPath: id + ".log",
			Linux: &runtimeapi.LinuxContainerConfig{Resources: &runtimeapi.LinuxContainerResources{
				MemoryLimitInBytes: memory << 20, CpuQuota: quota, CpuPeriod: 100_000,
			}}}
		if _, err := r.CreateContainer(t.Context(), p, &sandbox.Container{ID: id, ImageID: "i", Config: config}); err != nil {
			t.Fatal(err)
		}
		return guest.called(guestapi.MethodUpdatePod) - calls
	}
	memory := func() uint64 {
		now, err := r.machines.cgroups.Memory(r.machines.machine.Definition.Cgroup)
		if err != nil {
			t.Fatal(err)
		}
		return now>>20 - resources.GuestOverhead>>20
	}
	if n := create("d", 512, 250_000); n != 1 || memory() != 768 {
		t.Errorf("a container with 512 MiB: the guest was called %d times, and has %d MiB for containers, want once and 768", n, memory())
	}
	if n := create("e", 0, 0); n != 1 || memory() <= 768 {
		t.Errorf("a container without limits: the guest was called %d times, and has %d MiB for containers, want once and more than 768", n,
			memory())
	}
	quota := read("cpu", map[bool]string{true: "cpu.max", false: "cpu.cfs_quota_us"}[r.machines.cgroups.V2])
	if !strings.HasPrefix(quota, "max") && quota != "-1" {
		t.Errorf("the machine's CPU time beside a container without limits: got %s, want no limit", quota)
	}
	if err := r.ledger.Loaded("d").Set(func(s *state) { s.Exit(s.StartedAt, 0, "", "") }); err != nil {
		t.Fatal(err)
	}
	before := memory()
	if n := create("f", 16, 0); n != 0 || memory() != before {
		t.Errorf("a small container after a large one has ended: the guest was called %d times, and has %d MiB, want none and %d", n, memory(),
			before)
	}
	if want := []int{3}; !slices.Equal(r.machines.driver.added, want) {
		t.Errorf("CPUs: got %v, want %v", r.machines.driver.added, want)
	}
}
