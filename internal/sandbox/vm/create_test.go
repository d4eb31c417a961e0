package vm

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/resources"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/volumes"
)

// TestRefused: CreateContainer refuses bad images, annotations and devices, and the error names the reason.
func TestRefused(t *testing.T) {
	r := newRig(t)
	for name, test := range map[string]struct {
		image  string
		change func(*runtimeapi.PodSandboxConfig, *runtimeapi.ContainerConfig)
		class  func(error) bool
		says   string
	}{
		"no disk": {"busybox", nil, errdefs.IsInvalidArgument, "neither a disk nor a kernel"},
		"shrunk disk": {"disk", func(p *runtimeapi.PodSandboxConfig, _ *runtimeapi.ContainerConfig) {
			p.Annotations["VirtletRootVolumeSize"] = "512"
		}, errdefs.IsInvalidArgument, "VirtletRootVolumeSize"},
		"args of disk": {"disk", func(_ *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig) { c.Args = []string{"single"} },
			errdefs.IsNotImplemented, "command line"},
		"device": {"disk", func(_ *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig) {
			c.Devices = []*runtimeapi.Device{{HostPath: "/dev/null", ContainerPath: "/dev/null", Permissions: "rw"}}
		}, errdefs.IsNotImplemented, "devices[0]"},
		"root size of a CD-ROM": {"cd", func(p *runtimeapi.PodSandboxConfig, _ *runtimeapi.ContainerConfig) {
			p.Annotations["tripod.dev/vm.root-volume-size"] = "1Gi"
		}, errdefs.IsInvalidArgument, "tripod.dev/vm.root-volume-size"},
		"kernel as CD-ROM": {"kernel", func(p *runtimeapi.PodSandboxConfig, _ *runtimeapi.ContainerConfig) {
			p.Annotations["tripod.dev/vm.image-medium"] = "cdrom"
		}, errdefs.IsInvalidArgument, "tripod.dev/vm.image-medium"},
		"libvirt": {"disk", func(p *runtimeapi.PodSandboxConfig, _ *runtimeapi.ContainerConfig) {
			p.Annotations["VirtletLibvirtCPUSetting"] = "mode: host-model"
		}, errdefs.IsNotImplemented, "VirtletLibvirtCPUSetting"},
	} {
		t.Run(name, func(t *testing.T) {
			config := r.container(&sandbox.Pod{}, test.image).Config
			p := r.pod(name, func(pod *runtimeapi.PodSandboxConfig) {
				if test.change != nil {
					test.change(pod, config)
				}
			})
			_, err := r.CreateContainer(r.ctx(), p, &sandbox.Container{ID: p.ID, ImageID: test.image, Config: config})
			if !test.class(err) || !strings.Contains(err.Error(), test.says) {
				t.Errorf("CreateContainer error = %v, want %q", err, test.says)
			}
			r.must(r.RemoveSandbox(r.ctx(), p))
		})
	}
}

// TestCDROM: a machine with a CD-ROM image boots it from a drive, before its other disks, and has no root disk. The
// annotation decides about the image's medium if it is there. A boot sector on a CD-ROM is not judged, even if it has no
// code or its partitions are incomplete, as on some images that are also disks.
func TestCDROM(t *testing.T) {
	r := newRig(t)
	for i, test := range []struct {
		image, medium string
		cdrom         bool
	}{{"cd", "", true}, {"cd-cut", "", true}, {"cd", "disk", false}, {"disk", "cdrom", true}, {"disk", "disk", false}} {
		p := r.pod(fmt.Sprint("cd", i), func(c *runtimeapi.PodSandboxConfig) {
			c.Annotations["tripod.dev/vm.image-medium"] = test.medium
			c.Annotations["tripod.dev/vm.scratch-disks"] = "/dev/target=1Mi"
		})
		c := r.create(p, test.image)
		disks := r.driver.guest(c.ID).definition.Disks
		first := machine.Disk{ID: "cdrom", File: machine.File{Path: filepath.Join(r.images.dir, test.image)}, Format: "raw", ReadOnly: true,
			Bus: machine.BusCDROM}
		if got := disks[0]; (got == first) != test.cdrom || !test.cdrom && got.ID != "root" || disks[1].ID != "scratch0" {
			t.Errorf("image %s, medium %q: disks = %+v, want a CD-ROM first: %t", test.image, test.medium, disks, test.cdrom)
		}
		if _, err := os.Stat(r.config.overlayFile(c.ID)); errors.Is(err, os.ErrNotExist) != test.cdrom {
			t.Errorf("image %s, medium %q: Stat(overlay) error = %v, want an overlay: %t", test.image, test.medium, err, !test.cdrom)
		}
		r.must(r.RemoveSandbox(r.ctx(), p))
	}
	o := plan{volumes: volumes.Volumes{Root: "/dev/volume"}}
	if err := o.chooseMedium(&disk.MachineImage{Format: disk.FormatRaw, ISO9660: true}); !errdefs.IsInvalidArgument(err) ||
		!strings.Contains(err.Error(), "/dev/volume") {
		t.Errorf("a CD-ROM with a root disk on a block device: got error %v, want ErrInvalidArgument that names the device", err)
	}
	kernel := plan{}
	if err := kernel.chooseMedium(&disk.MachineImage{Layout: disk.LayoutKernel, Format: disk.FormatRaw, ISO9660: true}); err != nil ||
		kernel.cdrom {
		t.Errorf("an ISO file beside a kernel: CD-ROM %t, error %v; want a disk", kernel.cdrom, err)
	}
}

// TestKernelImage: a kernel image boots its kernel, with the container's arguments on the command line and no root
// disk.
func TestKernelImage(t *testing.T) {
	r := newRig(t)
	p := r.pod("kernel")
	c := r.create(p, "kernel", func(c *runtimeapi.ContainerConfig) { c.Args = []string{"panic=1"} })
	d := r.driver.guest(c.ID).definition
	if d.Kernel == nil || d.Cmdline != "console=ttyS0 quiet panic=1" || d.Disks[0].ID != "cidata" {
		t.Errorf("wrong definition %+v", d)
	}
}

// TestUsers: pods never share a user, and the configured number of users can be used up.
func TestUsers(t *testing.T) {
	r := newRig(t)
	seen := map[int]bool{}
	for i := range 3 {
		_, c := r.run(fmt.Sprint(i), "disk")
		seen[r.driver.guest(c.ID).definition.UID] = true
	}
	if len(seen) != 3 {
		t.Errorf("three pods have the users %v", seen)
	}
	r.restart()
	p := r.podConfig("one too many")
	if err := r.CreateSandbox(r.ctx(), p); !errdefs.IsResourceExhausted(err) {
		t.Errorf("CreateSandbox without a free user: error = %v, want ErrResourceExhausted", err)
	}
	r.must(r.RemoveSandbox(r.ctx(), p))
}

// TestCPUs: a machine without a CPU quota has as many CPUs as it asks for, if the node has them, and at least the default.
func TestCPUs(t *testing.T) {
	b := &Backend{cfg: settings{Config: Config{VM: config.Default().VM}}}
	node := resources.NodeCPUs()
	if node < 1 {
		t.Fatalf("CPUs of the node: got %d", node)
	}
	for name, c := range map[string]struct {
		res      *runtimeapi.LinuxContainerResources
		standard int
		want     int
	}{
		"nothing":                  {nil, 1, 1},
		"nothing, another default": {nil, 3, 3},
		"best effort":              {&runtimeapi.LinuxContainerResources{CpuShares: 2}, 1, 1},
		"half a CPU":               {&runtimeapi.LinuxContainerResources{CpuShares: 512}, 1, 1},
		"more than one":            {&runtimeapi.LinuxContainerResources{CpuShares: 1025}, 1, min(2, node)},
		"less than the default":    {&runtimeapi.LinuxContainerResources{CpuShares: 2048}, 3, 3},
		"more than the node has":   {&runtimeapi.LinuxContainerResources{CpuShares: 262_144}, 1, node},
		"exclusive CPUs":           {&runtimeapi.LinuxContainerResources{CpuShares: 2048, CpuQuota: -1, CpusetCpus: "0-1"}, 1, min(2, node)},
		"a quota":                  {&runtimeapi.LinuxContainerResources{CpuShares: 2048, CpuQuota: 250_000, CpuPeriod: 100_000}, 1, 3},
	} {
		b.cfg.VM.DefaultCPUs = c.standard
		if got := b.cpus(annotations.Options{}, c.res); got != c.want {
			t.Errorf("%s: got %d CPUs, want %d", name, got, c.want)
		}
	}
}

// TestUpdate: CPU limits and memory change in place, but a running guest gets no more memory than it was started with.
func TestUpdate(t *testing.T) {
	r := newRig(t)
	p, c := r.run("update", "disk")
	c.Config.Linux.Resources = &runtimeapi.LinuxContainerResources{CpuShares: 512, CpuQuota: 50_000, CpuPeriod: 100_000}
	r.must(r.UpdateContainer(r.ctx(), p, c))
	most := r.driver.guest(c.ID).definition.Memory
	cgroupOf := func() uint64 {
		limit, err := r.cgroups.MemoryLimit(r.cgroupOf(p))
		r.must(err)
		return limit - r.cfg.VM.MemoryOverhead
	}
	resize := func(memory uint64) error {
		c.Config.Linux.Resources.MemoryLimitInBytes = int64(memory)
		return r.UpdateContainer(r.ctx(), p, c)
	}
	if err := resize(2 * most); !errdefs.IsNotImplemented(err) || cgroupOf() != most {
		t.Errorf("UpdateContainer with more memory than the guest was started with: error = %v, cgroup = %d, want ErrNotImplemented and %d", err,
			cgroupOf(), most)
	}
	r.driver.memoryErr = errdefs.ErrFailedPrecondition
	if err := resize(64 << 20); !errdefs.IsFailedPrecondition(err) || cgroupOf() != most {
		t.Errorf("UpdateContainer of a guest that uses its memory: error = %v, cgroup = %d, want ErrFailedPrecondition and %d", err, cgroupOf(),
			most)
	}
	r.driver.memoryErr, r.driver.memories = nil, nil
	for _, memory := range []uint64{64 << 20, 96 << 20, most} {
		if err := resize(memory); err != nil || cgroupOf() != memory {
			t.Errorf("UpdateContainer to %d bytes: error = %v, cgroup = %d", memory, err, cgroupOf())
		}
	}
	if want := []uint64{64 << 20, 96 << 20, most}; !slices.Equal(r.driver.memories, want) {
		t.Errorf("memories = %v, want %v", r.driver.memories, want)
	}
	r.must(resize(64 << 20))
	r.must(r.StopContainer(r.ctx(), p, c, time.Minute))
	r.must(r.StartContainer(r.ctx(), p, c))
	if d := r.driver.guest(c.ID).definition; d.Memory != 64<<20 {
		t.Errorf("memory after a restart of the machine = %d, want 64 MiB", d.Memory)
	}
	r.must(r.StopContainer(r.ctx(), p, c, time.Minute))
	r.must(resize(2 * most))
	if d := r.driver.guest(c.ID).definition; d.Memory != 2*most {
		t.Errorf("memory of a stopped machine = %d, want %d", d.Memory, 2*most)
	}
	c.Config.Linux.Resources.MemoryLimitInBytes = 0
	p.Config.Linux = &runtimeapi.LinuxPodSandboxConfig{Resources: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 80 << 20}}
	r.must(r.UpdateContainer(r.ctx(), p, c))
	if d := r.driver.guest(c.ID).definition; d.Memory != 80<<20 {
		t.Errorf("memory with a limit of the pod = %d, want 80 MiB", d.Memory)
	}
}
