package vm

import (
	"context"
	"fmt"
	"os"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/network/tap"
	"github.com/tripod-run/tripod/internal/vm/annotations"
	"github.com/tripod-run/tripod/internal/vm/cloudinit"
	"github.com/tripod-run/tripod/internal/vm/qcow2"
	"github.com/tripod-run/tripod/sandbox"
)

var (
	fpLeased    = failpoint.New("vm.create-container.leased")
	fpOverlay   = failpoint.New("vm.create-container.overlay")
	fpCloudInit = failpoint.New("vm.create-container.cloud-init")
	fpDefined   = failpoint.New("vm.create-container.defined")
	fpCreated   = failpoint.New("vm.create-container.created")
)

// order is one CreateContainer: all that a machine is made of.
type order struct {
	pod        *sandbox.Pod
	container  *sandbox.Container
	at         *pod
	options    annotations.Options
	files      *image.DiskFiles
	interfaces []tap.Interface
	volumes    volumes
	warnings   []string
}

// CreateContainer implements sandbox.Backend: the image is leased, the root disk, the cloud-init image and the definition are
// made. What is wrong with the image or the volumes is found here.
func (b *Backend) CreateContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (sandbox.Resolved, error) {
	o, err := b.order(ctx, p, c)
	if err != nil {
		return sandbox.Resolved{}, err
	}
	defer o.files.Close()
	if err := b.makeDisks(ctx, o); err != nil {
		return sandbox.Resolved{}, err
	}
	definition, err := b.definition(o)
	if err != nil {
		return sandbox.Resolved{}, err
	}
	if err := b.cfg.Driver.Define(ctx, definition); err != nil {
		return sandbox.Resolved{}, fmt.Errorf("define the machine: %w", err)
	}
	if err := fpDefined.Hit(ctx); err != nil {
		return sandbox.Resolved{}, err
	}
	h := b.keep(&handle{id: c.ID})
	err = b.set(h, func(s *state) {
		*s = state{
			ID: c.ID, Phase: phaseCreated, Image: c.ImageID, Layout: string(o.files.Layout), Definition: definition,
			Warnings: o.warnings, WaitForAgent: o.options.WaitForAgent,
		}
	})
	if err != nil {
		return sandbox.Resolved{}, err
	}
	return sandbox.Resolved{Mounts: o.volumes.mounts, StopSignal: runtimeapi.Signal_SIGNAL_SIGTERM}, fpCreated.Hit(ctx)
}

// order gathers what the machine is made of, and leases its image.
func (b *Backend) order(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (o *order, err error) {
	o = &order{pod: p, container: c}
	if o.at, err = b.sandbox(p.ID); err != nil {
		return nil, fmt.Errorf("the sandbox is not there: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	if o.options, _, err = annotations.Parse(p.Config.GetAnnotations()); err != nil {
		return nil, err
	}
	made, err := b.cfg.Images.Machine(ctx, c.ImageID)
	if err != nil {
		return nil, fmt.Errorf("image of the machine: %w", err)
	}
	if o.volumes, err = volumesOf(c.Config); err != nil {
		return nil, err
	}
	if o.interfaces, err = b.cfg.Network.Read(b.cfg.tapsFile(p.ID)); err != nil {
		return nil, fmt.Errorf("the pod's taps: %w", err)
	}
	if size := o.options.RootVolumeSize; made.Format != "" && size > 0 && size < made.VirtualSize {
		return nil, fmt.Errorf("annotation VirtletRootVolumeSize (tripod.dev/vm.root-volume-size): %d bytes are less than the %d of the image's disk, which cannot shrink: %w",
			size, made.VirtualSize, errdefs.ErrInvalidArgument)
	}
	if len(c.Config.GetArgs()) > 0 && made.Layout != image.LayoutKernel {
		return nil, unsupported("args", "%q: only an image with a kernel of its own has a command line; a disk boots what is on it", c.Config.GetArgs())
	}
	if o.files, err = b.cfg.Images.OpenDisk(ctx, c.ID, c.ImageID); err != nil {
		return nil, fmt.Errorf("image of the machine: %w", err)
	}
	if err := fpLeased.Hit(ctx); err != nil {
		o.files.Close()
		return nil, err
	}
	return o, nil
}

// makeDisks makes the root disk and the cloud-init image. What an earlier try has left is made anew.
func (b *Backend) makeDisks(ctx context.Context, o *order) error {
	id := o.container.ID
	if err := os.RemoveAll(b.cfg.diskDir(id)); err != nil {
		return noRoom(fmt.Errorf("the machine's directory: %w", err))
	}
	if err := os.MkdirAll(b.cfg.diskDir(id), 0o700); err != nil {
		return noRoom(fmt.Errorf("the machine's directory: %w", err))
	}
	if o.files.Disk != nil {
		size := max(o.options.RootVolumeSize, o.files.VirtualSize)
		if err := qcow2.CreateOverlay(ctx, b.cfg.overlayFile(id), size, qcow2.Overlay{}); err != nil {
			return noRoom(fmt.Errorf("make the root disk: %w", err))
		}
	}
	if err := fpOverlay.Hit(ctx); err != nil {
		return err
	}
	built, err := cloudinit.Build(b.cloudInit(o))
	if err != nil {
		return fmt.Errorf("cloud-init: %w", err)
	}
	o.warnings = append(o.warnings, built.Warnings...)
	if err := built.WriteFile(b.cfg.cloudInitFile(id), 0o600); err != nil {
		return noRoom(fmt.Errorf("write the cloud-init image: %w", err))
	}
	return fpCloudInit.Hit(ctx)
}

// cloudInit is what the guest is told at its first boot.
func (b *Backend) cloudInit(o *order) cloudinit.Input {
	dns := o.pod.Config.GetDnsConfig()
	in := cloudinit.Input{
		Options: o.options, PodUID: o.pod.Config.GetMetadata().GetUid(), Hostname: hostname(o.pod),
		Mounts: o.volumes.told, Devices: o.volumes.devices,
		DNS:   cloudinit.DNS{Servers: dns.GetServers(), Search: dns.GetSearches()},
		Agent: b.cfg.AgentDisk != "",
	}
	for _, e := range o.container.Config.GetEnvs() {
		in.Env = append(in.Env, cloudinit.EnvVar{Name: e.GetKey(), Value: string(e.GetValue())})
	}
	for _, n := range o.interfaces {
		told := cloudinit.Interface{Name: n.Link, MAC: n.MAC, MTU: n.MTU, Addrs: n.Addrs}
		for _, r := range n.Routes {
			told.Routes = append(told.Routes, cloudinit.Route{Dst: r.Dst, Via: r.GW, Metric: r.Metric})
		}
		in.Interfaces = append(in.Interfaces, told)
	}
	return in
}
