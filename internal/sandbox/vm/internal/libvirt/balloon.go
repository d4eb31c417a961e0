package libvirt

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	golibvirt "github.com/digitalocean/go-libvirt"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// SetMemory implements machine.Driver.
func (d *Driver) SetMemory(ctx context.Context, name string, memory uint64) error {
	domain, _, err := d.running(name)
	if err != nil {
		return err
	}
	return machine.Memory{
		Set: func(ctx context.Context, memory uint64) error {
			_, err := ask(ctx, d.link, "set the memory of domain "+domain.Name, func(c *golibvirt.Libvirt) (struct{}, error) {
				return struct{}{}, c.DomainSetMemoryFlags(domain, memory>>10, uint32(golibvirt.DomainMemLive))
			})
			return err
		},
		Actual: func(ctx context.Context) (uint64, error) {
			figures, err := d.Stats(ctx, name)
			return figures.Memory, err
		},
	}.Change(ctx, memory)
}

// AddCPUs implements machine.Driver.
func (d *Driver) AddCPUs(context.Context, string, int) error {
	return fmt.Errorf("the domains of the driver libvirt get no further CPUs: %w", errdefs.ErrNotImplemented)
}

// Plug implements machine.Driver.
func (d *Driver) Plug(context.Context, string, machine.PlugDisk) error { return errNoPlug }

// Unplug implements machine.Driver.
func (d *Driver) Unplug(context.Context, string, int) error { return errNoPlug }

var errNoPlug = fmt.Errorf("libvirt opens disks by their paths, with its own user: set vm.driver = \"qmp\": %w", errdefs.ErrNotImplemented)

// Save implements machine.Driver.
func (d *Driver) Save(context.Context, string, string) error { return errNoSave }

// SaveKey implements machine.Driver.
func (d *Driver) SaveKey(context.Context, machine.Definition) (string, error) { return "", errNoSave }

var errNoSave = fmt.Errorf("libvirt saves no machines that others could continue from: set vm.driver = \"qmp\": %w",
	errdefs.ErrNotImplemented)
