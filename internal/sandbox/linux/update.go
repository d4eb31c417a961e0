package linux

import (
	"context"
	"fmt"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
)

// UpdateContainer implements sandbox.Updater. It also changes the specification for later starts.
func (b *Backend) UpdateContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	h, err := b.ledger.Get(p.ID, c.ID)
	if err != nil {
		return err
	}
	res, err := spec.Resources(c.Config.GetLinux().GetResources(), b.host)
	if err != nil {
		return err
	}
	config, err := readConfig(b.bundleOf(h))
	if err != nil {
		return err
	}
	if _, l := h.Snapshot(); l != nil {
		if err := b.runtime.update(ctx, h.ID, res); err != nil {
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
	return ledger.WriteJSON(configFile(b.bundleOf(h)), config)
}
