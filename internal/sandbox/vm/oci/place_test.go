package oci

import (
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/resources"
	"github.com/tripod-run/tripod/test/harness/testns"
)

// allImages is a fake image service that has each image.
type allImages struct{ Images }

func (allImages) Get(_ context.Context, id string) (image.Image, error) {
	return image.Image{ID: id}, nil
}
func (allImages) OpenRootDisk(context.Context, string, string) (*os.File, error) {
	return os.Open(os.DevNull)
}

// withCgroup gives the pod's machine a cgroup, and returns a function that reads a file of it.
func (r *rig) withCgroup(t *testing.T) (read func(controller, file string) string) {
	t.Helper()
	parent := testns.Cgroup()
	if parent == "" {
		t.Fatal("run by hack/testns.sh: the test makes cgroups")
	}
	tree, err := cgroup.Open(cgroup.DriverCgroupfs, parent+"/vm")
	if err != nil {
		t.Fatal(err)
	}
	dir := tree.Parent + "/" + cgroup.Mark + "oci"
	if err := tree.Create(dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tree.Remove(context.Background(), dir); err != nil {
			t.Error(err)
		}
	})
	d := &r.machines.machine.Definition
	r.machines.cgroups, d.Cgroup = resources.Cgroups{Tree: tree, Overhead: r.cfg.VM.MemoryOverhead}, dir
	if err := r.machines.cgroups.Limit(dir, d.Memory, nil); err != nil {
		t.Fatal(err)
	}
	return func(controller, file string) string {
		raw, err := os.ReadFile(filepath.Join(tree.Roots[tree.Hierarchy(controller)], dir, file))
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(raw))
	}
}

// sawResources is a guest that collects the resources of the pod and the containers that it gets.
func sawResources(saw *[]*runtimeapi.LinuxContainerResources) *fakeGuest {
	return &fakeGuest{answer: func(_ context.Context, r guestapi.Request, body, out io.ReadWriter) (err error) {
		switch r.Method {
		case guestapi.MethodCreate:
			var c guestapi.Create
			err = json.NewDecoder(body).Decode(&c)
			*saw = append(*saw, c.Container.Config.GetLinux().GetResources())
		case guestapi.MethodUpdate:
			var c guestapi.Container
			err = json.NewDecoder(body).Decode(&c)
			*saw = append(*saw, c.Config.GetLinux().GetResources())
		case guestapi.MethodUpdatePod:
			var p guestapi.Pod
			err = json.NewDecoder(body).Decode(&p)
			*saw = append(*saw, p.Config.GetLinux().GetResources())
		}
		if err != nil {
			return err
		}
		return json.NewEncoder(out).Encode(sandbox.Resolved{})
	}}
}

// hardware returns a container's configuration with CPUs of the node, and the limit that a kubelet sends for each size of huge
// pages.
func hardware(cpus string) *runtimeapi.ContainerConfig {
	return &runtimeapi.ContainerConfig{LogPath: "x.log",
		Linux: &runtimeapi.LinuxContainerConfig{Resources: &runtimeapi.LinuxContainerResources{
			CpuShares: 1024, CpusetCpus: cpus, CpusetMems: "0", HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB"}},
		}}}
}

// TestCPUSetsAreTheMachines: the machine runs on the CPUs of its containers that have not ended, and the guest does not see
// numbers of the node's hardware.
func TestCPUSetsAreTheMachines(t *testing.T) {
	if runtime.NumCPU() < 2 {
		t.Skip("a machine with one CPU has no two sets of CPUs")
	}
	var saw []*runtimeapi.LinuxContainerResources
	r := newRig(t, sawResources(&saw))
	read := r.withCgroup(t)
	want := func(what, cpus string) {
		t.Helper()
		if got := read("cpuset", "cpuset.cpus"); got != cpus {
			t.Errorf("CPUs of the machine %s: got %q, want %q", what, got, cpus)
		}
	}
	update := func(cpus string) {
		t.Helper()
		r.container.Config = hardware(cpus)
		if err := r.UpdateContainer(t.Context(), r.pod, r.container); err != nil {
			t.Fatal(err)
		}
	}
	update("0")
	want("with one container", "0")
	second := &sandbox.Container{ID: "d", ImageID: "i", Config: hardware("1")}
	if _, err := r.CreateContainer(t.Context(), r.pod, second); err != nil {
		t.Fatal(err)
	}
	want("with two containers", "0-1")
	update("1")
	want("after an update", "1")
	update("0")
	if got := read("cpuset", "cpuset.mems"); got != "0" {
		t.Errorf("memory nodes of the machine: got %q, want 0", got)
	}
	r.noLog()
	r.end(r.handle, r.life, ended())
	<-r.life.ended
	want("after the end of a container", "1")
	for _, res := range saw {
		if res.GetCpusetCpus() != "" || res.GetCpusetMems() != "" || len(res.GetHugepageLimits()) > 0 || res.GetCpuShares() != 1024 {
			t.Errorf("resources in the guest: got %v, want only the shares", res)
		}
	}
	if len(saw) != 4 {
		t.Errorf("calls: got %d, want 4", len(saw))
	}
}

// TestGuestPodHasNoHardware: the pod's resources in the guest do not name the node's hardware.
func TestGuestPodHasNoHardware(t *testing.T) {
	linux := &runtimeapi.LinuxPodSandboxConfig{Resources: hardware("1").Linux.Resources, Overhead: hardware("1").Linux.Resources}
	inner, err := guestPod(&sandbox.Pod{Config: &runtimeapi.PodSandboxConfig{Linux: linux,
		DnsConfig: &runtimeapi.DNSConfig{Servers: []string{"10.0.0.10"}}}}, machineSize{})
	if err != nil {
		t.Fatal(err)
	}
	for _, res := range []*runtimeapi.LinuxContainerResources{inner.Config.Linux.Resources, inner.Config.Linux.Overhead} {
		if res.CpusetCpus != "" || res.CpusetMems != "" || len(res.HugepageLimits) > 0 || res.CpuShares != 1024 {
			t.Errorf("resources in the guest: got %v, want only the shares", res)
		}
	}
}

// TestHardwareIsValidated: limits of 0 on huge pages are what every kubelet sends; a guest can have no others.
func TestHardwareIsValidated(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*runtimeapi.LinuxContainerResources)
		is     func(error) bool
		field  string
	}{
		"a kubelet's": {func(*runtimeapi.LinuxContainerResources) {}, func(err error) bool { return err == nil }, ""},
		"huge pages": {func(r *runtimeapi.LinuxContainerResources) { r.HugepageLimits[0].Limit = 2 << 20 }, errdefs.IsNotImplemented,
			"linux.resources.hugepage_limits"},
		"no list of CPUs": {func(r *runtimeapi.LinuxContainerResources) { r.CpusetCpus = "all" }, errdefs.IsInvalidArgument,
			"linux.resources.cpuset_cpus"},
		"no list of nodes": {func(r *runtimeapi.LinuxContainerResources) { r.CpusetMems = "-" }, errdefs.IsInvalidArgument,
			"linux.resources.cpuset_mems"},
	} {
		r := newRig(t, &fakeGuest{})
		r.annotations = sandbox.AllowList{"*"}
		pod, container := strings.Repeat("a", 64), strings.Repeat("c", 64)
		inContainer, inPod := hardware("0-1"), hardware("0-1").Linux.Resources
		c.change(inContainer.Linux.Resources)
		c.change(inPod)
		p := &sandbox.Pod{ID: pod, Config: &runtimeapi.PodSandboxConfig{LogDirectory: "/var/log/pods/p"}}
		err := r.Validate(p, &sandbox.Container{ID: container, Config: inContainer})
		p.Config.Linux = &runtimeapi.LinuxPodSandboxConfig{Resources: inPod}
		for of, err := range map[string]error{"container": err, "pod": r.Validate(p, nil)} {
			if !c.is(err) || err != nil && !strings.Contains(err.Error(), c.field) {
				t.Errorf("%s of a %s: got error %v, want one about %q", name, of, err, c.field)
			}
		}
	}
}
