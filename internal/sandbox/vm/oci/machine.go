package oci

// This file makes the machines of pods.

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/identity"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/resources"
	"github.com/tripod-run/tripod/internal/sandbox/vm/templates"
)

// machine returns the unit pod of the machine, and its container.
func (o *Backend) machine(p *sandbox.Pod) (*sandbox.Pod, *sandbox.Container) {
	return o.machineOf(p, o.podSize(p))
}

// machineOf returns the unit pod of a machine of this size, and its container.
func (o *Backend) machineOf(p *sandbox.Pod, size machineSize) (*sandbox.Pod, *sandbox.Container) {
	linux := p.Config.GetLinux()
	annotated := map[string]string{
		annotations.Prefix + "scratch-disks": fmt.Sprintf("/dev/scratch=%d", scratchSize), annotations.Prefix + "share-driver": "virtiofs",
		annotations.Prefix + "wait-for-agent": "true",
	}
	for _, name := range machineAnnotations {
		for _, key := range []string{annotations.Prefix + name.own, name.virtlet} {
			if value, ok := p.Config.GetAnnotations()[key]; ok && o.annotations.Allows(key) {
				annotated[key] = value
			}
		}
	}
	config := &runtimeapi.PodSandboxConfig{
		Metadata: p.Config.GetMetadata(), Hostname: p.Config.GetHostname(), DnsConfig: p.Config.GetDnsConfig(), Annotations: annotated,
		Linux: &runtimeapi.LinuxPodSandboxConfig{CgroupParent: linux.GetCgroupParent(), Overhead: linux.GetOverhead(),
			Resources: linux.GetResources()},
	}
	res := &runtimeapi.LinuxContainerResources{}
	if r := linux.GetResources(); r != nil {
		res = proto.CloneOf(r)
	}
	res.MemoryLimitInBytes = int64(size.memory + resources.GuestOverhead)
	if size.quota != 0 {
		res.CpuQuota, res.CpuPeriod = size.quota, resources.QuotaPeriod
	}
	res.Unified, res.HugepageLimits = nil, nil // the guest's cgroups have the one, nobody the other
	machine := *p
	machine.Config = config
	return &machine, &sandbox.Container{
		ID: p.ID, ImageID: "guest",
		Config: &runtimeapi.ContainerConfig{
			Metadata: &runtimeapi.ContainerMetadata{Name: "machine"},
			// The share is read-only, but not the volumes that are mounted below it later. A guest that could make links in it
			// could lead the daemon's mounts elsewhere.
			Mounts: []*runtimeapi.Mount{{ContainerPath: guestapi.Shared, HostPath: o.sharedDir(p.ID), Readonly: true,
				Propagation: runtimeapi.MountPropagation_PROPAGATION_HOST_TO_CONTAINER}},
			Linux: &runtimeapi.LinuxContainerConfig{Resources: res},
		},
	}
}

// templateKind returns what is special about templates of machines for containers.
func (o *Backend) templateKind() templates.Kind {
	return templates.Kind{
		Handler: "vm-oci",
		Unit: func(w templates.Wish) (*sandbox.Pod, *sandbox.Container) {
			mp, mc := o.machine(w.Pod)
			mc.Config.Mounts, mc.Config.Linux.Resources.MemoryLimitInBytes = nil, int64(w.Memory)
			return mp, mc
		},
		Settle: func(ctx context.Context, id string) error {
			return o.call(ctx, id, guestapi.Request{Method: guestapi.MethodFreeze}, nil, nil)
		},
		// The machine has written to this much of its memory: Linux takes 1/64 of it for the list of its pages.
		Size: func(memory uint64) uint64 { return 90<<20 + memory/64 },
		Time: 5 * time.Minute,
	}
}

// startMachine makes and starts the pod's machine, unless it runs, and prepares its guest for the pod.
func (o *Backend) startMachine(ctx context.Context, p, mp *sandbox.Pod, mc *sandbox.Container) error {
	status, err := o.machines.Status(ctx, mp, mc)
	if err != nil {
		return err
	}
	if status.State != sandbox.StateRunning {
		if _, err := o.machines.CreateContainer(ctx, mp, mc); err != nil {
			return err
		}
		starting, cancel := ctx, context.CancelFunc(func() {})
		if o.templateOf(p.ID) != "" {
			starting, cancel = context.WithTimeoutCause(ctx, templates.StartTime,
				fmt.Errorf("the guest did not continue within %s", templates.StartTime))
		}
		err := o.machines.StartContainer(starting, mp, mc)
		cancel()
		if err != nil {
			return fmt.Errorf("the pod's machine: %w%s", err, o.machines.LastWords(p.ID))
		}
	}
	if err := fpBooted.Hit(ctx); err != nil {
		return err
	}
	err = o.setUp(ctx, p)
	if errors.Is(err, agent.ErrRestarted) {
		_, _ = o.awaitRestart(ctx, p.ID) // a guest without a pod has no statuses
		err = o.setUp(ctx, p)
	}
	if err != nil {
		return fmt.Errorf("prepare the guest: %w", err)
	}
	if err := o.awaitGrowth(ctx, p.ID); err != nil {
		return fmt.Errorf("the guest's memory: %w", err)
	}
	return nil
}

// useTemplate makes a machine that is about to be defined continue from a template, if there is one and the machine has not
// failed to.
func (o *Backend) useTemplate(ctx context.Context, p *sandbox.Pod, d *machine.Definition) error {
	if o.boots(p.ID) {
		return nil
	}
	return o.templates.Use(ctx, p, d)
}

// boots reports whether the pod's machine must boot, because it did not continue from a template.
func (o *Backend) boots(id string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	pod := o.pods[id]
	return pod != nil && pod.boots
}

// isTemplates reports whether an error of startMachine can come from a machine's template. In a guest that has answered,
// errors of the pod's own settings have other classes.
func (o *Backend) isTemplates(err error) bool {
	return errors.Is(err, machine.ErrSaved) || errors.Is(err, vm.ErrNoAgent) || errdefs.IsUnavailable(err)
}

// templateOf returns the name of the template from which a machine has continued, or "".
func (o *Backend) templateOf(id string) string {
	d, _ := o.machines.Definition(id)
	if d == nil {
		return ""
	}
	return templates.Of(*d)
}

// setUp tells the guest about its pod.
func (o *Backend) setUp(ctx context.Context, p *sandbox.Pod) error {
	wired, err := o.machines.Interfaces(p.ID)
	if err != nil {
		return fmt.Errorf("the pod's taps: %w", err)
	}
	inner, err := guestPod(p, o.podSize(p))
	if err != nil {
		return err
	}
	setup := guestapi.Setup{Pod: guestapi.Pod{Pod: *inner}, Now: time.Now(), Seed: make([]byte, identity.SeedSize)}
	rand.Read(setup.Seed)
	for _, n := range wired {
		i := guestapi.Interface{Name: n.Link, MAC: n.MAC, MTU: n.MTU, Addrs: n.Addrs}
		for _, r := range n.Routes {
			i.Routes = append(i.Routes, guestapi.Route{Dst: r.Dst, Via: r.GW, Metric: r.Metric})
		}
		setup.Interfaces = append(setup.Interfaces, i)
	}
	return o.call(ctx, p.ID, guestapi.Request{Method: guestapi.MethodSetup}, setup, nil)
}

// guestPod returns the pod as the guest sees it, in a machine of this size.
func guestPod(p *sandbox.Pod, size machineSize) (*sandbox.Pod, error) {
	dns, _, err := p.DNS()
	if err != nil {
		return nil, err
	}
	config := proto.CloneOf(p.Config)
	config.DnsConfig, config.LogDirectory, config.PortMappings = dns, guestapi.Logs, nil
	if config.Linux != nil {
		config.Linux.CgroupParent = ""
		guestResources(config.Linux.Resources)
		size.limit(config.Linux.Resources)
		guestResources(config.Linux.Overhead)
	}
	config.Hostname = cmp.Or(config.GetHostname(), config.GetMetadata().GetName())
	inner := *p
	inner.Config = config
	return &inner, nil
}
