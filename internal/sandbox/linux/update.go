package linux

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
)

// UpdateContainer implements sandbox.Updater. It also changes the specification, so that a later start has the new limits.
func (b *Backend) UpdateContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	h, err := b.lookup(p.ID, c.ID)
	if err != nil {
		if errdefs.IsNotFound(err) {
			return fmt.Errorf("container %s is not created: %w", c.ID, errdefs.ErrFailedPrecondition)
		}
		return err
	}
	res, err := spec.Resources(c.Config.GetLinux().GetResources(), b.host)
	if err != nil {
		return err
	}
	config, err := readConfig(h.bundle)
	if err != nil {
		return err
	}
	if _, l := h.snapshot(); l != nil {
		if err := b.runtime.update(ctx, h.id, res); err != nil {
			return fmt.Errorf("update container %s: %w", c.ID, err)
		}
		if c.Config.GetLinux().GetResources().GetCpuQuota() < 0 {
			if _, dir := b.cgroups.container(p, c.ID); b.host.CPUQuota {
				if err := b.cgroups.LiftQuota(dir); err != nil {
					return fmt.Errorf("update container %s: %w", c.ID, err)
				}
			}
		}
	}
	if old := config.Linux.Resources; old != nil {
		res.Devices = old.Devices // an update cannot change devices
	}
	config.Linux.Resources = res
	return writeJSON(configFile(h.bundle), config)
}
