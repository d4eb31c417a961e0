package linux

import (
	"context"
	"fmt"
	"path"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
	"github.com/tripod-run/tripod/internal/stats"
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
	if err := spec.AdjustResources(res, c.Adjustment.GetLinux().GetResources()); err != nil {
		return err
	}
	config, err := readConfig(b.bundleOf(h))
	if err != nil {
		return err
	}
	if _, l := h.Snapshot(); l != nil {
		if err := b.updateRunning(ctx, p, c, res); err != nil {
			return fmt.Errorf("update container %s: %w", c.ID, err)
		}
	}
	if old := config.Linux.Resources; old != nil {
		res.Devices = old.Devices // an update cannot change devices
	}
	config.Linux.Resources = res
	return ledger.WriteJSON(configFile(b.bundleOf(h)), config)
}

// updateRunning changes the cgroup of a running container.
func (b *Backend) updateRunning(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, res *specs.LinuxResources) error {
	wanted := c.Config.GetLinux().GetResources()
	_, dir := b.cgroups.container(p, c.ID)
	if err := stats.CheckShrink(dir, wanted.GetMemoryLimitInBytes()); err != nil {
		return err
	}
	if err := b.runtime.Update(ctx, c.ID, res); err != nil {
		return err
	}
	if err := b.cgroups.limitScope(dir, res); err != nil {
		return err
	}
	if wanted.GetCpuQuota() >= 0 {
		return nil
	}
	// See spec.Resources: the runtime is not asked to lift a quota.
	lift := b.cgroups.Limits(&runtimeapi.LinuxContainerResources{CpuQuota: -1}, nil)
	if crun := path.Join(dir, crunCgroup); b.cgroups.Joinable(crun) == nil {
		if err := b.cgroups.Apply(crun, lift); err != nil {
			return err
		}
	}
	return b.cgroups.Apply(dir, lift)
}

// UpdateSandbox implements sandbox.PodUpdater.
func (b *Backend) UpdateSandbox(_ context.Context, p *sandbox.Pod) error {
	linux := p.Config.GetLinux()
	if limit := linux.GetResources().GetMemoryLimitInBytes(); limit > 0 && linux.GetCgroupParent() == "" {
		dir, _ := b.cgroups.pod(p)
		if err := stats.CheckShrink(dir, limit+linux.GetOverhead().GetMemoryLimitInBytes()); err != nil {
			return fmt.Errorf("update pod %s: %w", p.ID, err)
		}
	}
	if err := b.cgroups.limit(p); err != nil {
		return fmt.Errorf("update pod %s: %w", p.ID, err)
	}
	return nil
}
