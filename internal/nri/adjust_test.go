package nri

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

func TestAdjustNothing(t *testing.T) {
	config := &runtimeapi.ContainerConfig{}
	c := &node.Container{Config: config}
	for _, a := range []*api.ContainerAdjustment{nil, {}, {Hooks: &api.Hooks{}, Linux: &api.LinuxContainerAdjustment{
		Resources: &api.LinuxResources{Memory: &api.LinuxMemory{}, Cpu: &api.LinuxCPU{}, Unified: map[string]string{}},
	}}} {
		if err := adjust(c, a, true); err != nil || c.Config != config || c.Adjustment != nil {
			t.Errorf("adjustment %v: got %v, error %v; want no change", a, c, err)
		}
	}
}

// full returns an adjustment of each sort.
func full() *api.ContainerAdjustment {
	a := &api.ContainerAdjustment{}
	a.AddAnnotation("by", "plugin")
	a.AddEnv("NEW", "1")
	a.RemoveEnv("OLD")
	a.SetArgs([]string{"prog", "arg"})
	a.AddMount(&api.Mount{Source: "/src", Destination: "/dst", Type: "bind", Options: []string{"ro"}})
	a.RemoveMount("/gone")
	a.AddCDIDevice(&api.CDIDevice{Name: "vendor.com/class=a"})
	a.SetLinuxMemoryLimit(100)
	a.SetLinuxCPUShares(7)
	return a
}

func TestAdjust(t *testing.T) {
	request := &runtimeapi.ContainerConfig{
		Envs:   []*runtimeapi.KeyValue{{Key: "OLD", Value: []byte("x")}, {Key: "KEPT", Value: []byte("y")}},
		Mounts: []*runtimeapi.Mount{{ContainerPath: "/gone"}, {ContainerPath: "/kept"}},
		Linux:  &runtimeapi.LinuxContainerConfig{Resources: &runtimeapi.LinuxContainerResources{CpuShares: 2, CpuQuota: 5}},
	}
	before := proto.CloneOf(request)
	limits := &runtimeapi.LinuxContainerConfig{Resources: &runtimeapi.LinuxContainerResources{CpuShares: 7, CpuQuota: 5,
		MemoryLimitInBytes: 100}}
	devices := []*runtimeapi.CDIDevice{{Name: "vendor.com/class=a"}}

	c := &node.Container{Config: request}
	if err := adjust(c, full(), false); err != nil {
		t.Fatal(err)
	}
	want := &runtimeapi.ContainerConfig{
		Envs:    []*runtimeapi.KeyValue{{Key: "KEPT", Value: []byte("y")}, {Key: "NEW", Value: []byte("1")}},
		Mounts:  []*runtimeapi.Mount{{ContainerPath: "/kept"}, {HostPath: "/src", ContainerPath: "/dst", Readonly: true}},
		Command: []string{"prog", "arg"}, Linux: limits, CDIDevices: devices,
	}
	if !proto.Equal(c.Config, want) || c.Adjustment.GetAnnotations()["by"] != "plugin" {
		t.Errorf("without a specification: got %v and %v, want %v and an annotation", c.Config, c.Adjustment, want)
	}

	c = &node.Container{Config: request}
	if err := adjust(c, full(), true); err != nil {
		t.Fatal(err)
	}
	want = proto.CloneOf(request)
	want.Linux, want.CDIDevices = limits, devices
	if !proto.Equal(c.Config, want) || len(c.Adjustment.GetMounts()) != 2 || len(c.Adjustment.GetEnv()) != 2 ||
		c.Adjustment.GetLinux() != nil {
		t.Errorf("with a specification: got %v and %v, want %v and the rest", c.Config, c.Adjustment, want)
	}
	if !proto.Equal(request, before) {
		t.Errorf("adjust changed the request: got %v, want %v", request, before)
	}
}

func TestAdjustRefusesByName(t *testing.T) {
	for want, a := range map[string]*api.ContainerAdjustment{
		"hooks": {Hooks: &api.Hooks{Poststop: []*api.Hook{{Path: "/x"}}}},
		"linux.resources.memory.reservation, linux.sysctl": {Linux: &api.LinuxContainerAdjustment{
			Sysctl: map[string]string{"a": "b"}, Resources: &api.LinuxResources{Memory: &api.LinuxMemory{Reservation: api.Int64(1)}},
		}},
		"mounts: /t: type \"tmpfs\"": {Mounts: []*api.Mount{{Destination: "/t", Type: "tmpfs"}}},
	} {
		err := adjust(&node.Container{Config: &runtimeapi.ContainerConfig{}}, a, false)
		if !errdefs.IsNotImplemented(err) || !strings.Contains(err.Error(), want) {
			t.Errorf("adjustment %v: got error %v, want ErrNotImplemented with %s", a, err, want)
		}
	}
}

func TestSplit(t *testing.T) {
	limits := &runtimeapi.LinuxContainerResources{
		CpuShares: 1, CpuQuota: 2, CpuPeriod: 3, CpusetCpus: "0", CpusetMems: "1", MemoryLimitInBytes: 4, MemorySwapLimitInBytes: 5,
		HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB", Limit: 6}}, Unified: map[string]string{"a": "b"},
	}
	got, rest := split(resourcesMessage(limits))
	if !proto.Equal(got, limits) || rest != nil {
		t.Errorf("split: got %v and %v, want %v and nothing", got, rest, limits)
	}
	pids := &api.LinuxResources{Pids: &api.LinuxPids{Limit: 7}, RdtClass: api.String("gold")}
	got, rest = split(pids)
	if got != nil || !proto.Equal(rest, pids) {
		t.Errorf("split: got %v and %v, want nothing and %v", got, rest, pids)
	}
}

// TestUpdateRefusesByName: an update cannot give devices to a container that exists, of whatever kind.
func TestUpdateRefusesByName(t *testing.T) {
	x := New(Config{})
	err := x.updateOne(t.Context(), &api.ContainerUpdate{ContainerId: "c", Linux: &api.LinuxContainerUpdate{
		Resources: &api.LinuxResources{Devices: []*api.LinuxDeviceCgroup{{Allow: true, Type: "b"}}},
	}})
	if !errdefs.IsNotImplemented(err) || !strings.Contains(err.Error(), "linux.resources.devices") {
		t.Errorf("update with a device: got error %v, want ErrNotImplemented with its name", err)
	}
}
