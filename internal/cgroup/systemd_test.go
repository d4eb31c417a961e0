package cgroup

import (
	"math"
	"reflect"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestPropertiesOf: each limit of cgroup v2 is the property of a unit that sets the same file.
func TestPropertiesOf(t *testing.T) {
	g := Tree{Driver: DriverSystemd, Parent: "tripod.slice", V2: true, Roots: map[string]string{"": t.TempDir()}}
	for name, c := range map[string]struct {
		writes []Write
		want   map[string]any
	}{
		"limits": {
			writes: append(g.Limits(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 30, CpuQuota: 150_000, CpuPeriod: 50_000,
				CpuShares: 512}, nil),
				CPUSet(&runtimeapi.LinuxContainerResources{CpusetCpus: "0,2-3,9", CpusetMems: "0"})...),
			want: map[string]any{"MemoryMax": uint64(1 << 30), "CPUQuotaPerSecUSec": uint64(3_000_000), "CPUQuotaPeriodUSec": uint64(50_000),
				"CPUWeight":   uint64(20),
				"AllowedCPUs": []byte{0b1101, 0b10}, "AllowedMemoryNodes": []byte{1}},
		},
		"no limits": {
			writes: append(g.Limits(&runtimeapi.LinuxContainerResources{MemoryLimitInBytes: -1, CpuQuota: -1}, nil), g.TaskLimit(nil)...),
			want: map[string]any{"MemoryMax": uint64(math.MaxUint64), "CPUQuotaPerSecUSec": uint64(math.MaxUint64),
				"TasksMax": uint64(math.MaxUint64)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			properties, err := propertiesOf(c.writes)
			if err != nil {
				t.Fatal(err)
			}
			got := map[string]any{}
			for _, p := range properties {
				got[p.Name] = p.Value.Value()
			}
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("properties: got %v, want %v", got, c.want)
			}
		})
	}
	for _, bad := range []Write{{File: "io.max", Value: "8:0 rbps=1"}, {File: "memory.max", Value: "much"}, {File: "cpu.max", Value: "1"},
		{File: "cpuset.cpus", Value: "x"}} {
		if p, err := propertiesOf([]Write{bad}); err == nil {
			t.Errorf("%+v: got %v, want an error", bad, p)
		}
	}
}

// TestUnitsOnlyWhereSystemdOwnsThem: on v1, and with the driver cgroupfs, the names of units are those of plain cgroups.
func TestUnitsOnlyWhereSystemdOwnsThem(t *testing.T) {
	for name, c := range map[string]struct {
		tree Tree
		want bool
	}{
		"systemd on v2":  {Tree{Driver: DriverSystemd, V2: true}, true},
		"systemd on v1":  {Tree{Driver: DriverSystemd}, false},
		"cgroupfs on v2": {Tree{Driver: DriverCgroupfs, V2: true}, false},
	} {
		if got := c.tree.isUnit("/a.slice/tripod-b.scope"); got != c.want {
			t.Errorf("%s: a scope is a unit: got %v, want %v", name, got, c.want)
		}
		if got := c.tree.isUnit("/tripod.slice/tripod-b.slice"); got != c.want {
			t.Errorf("%s: a slice is a unit: got %v, want %v", name, got, c.want)
		}
		if c.tree.isUnit("/tripod.slice/tripod-helpers.service/tripod-conmon") {
			t.Errorf("%s: a cgroup of a delegated service counts as a unit", name)
		}
	}
}
