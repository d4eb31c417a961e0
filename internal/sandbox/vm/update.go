package vm

import (
	"context"
	"fmt"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/fields"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/stats"
)

// UpdateContainer implements sandbox.Updater. A running machine's CPU limits change at once. Its memory changes within
// what the machine was started with, or can grow to.
func (b *Backend) UpdateContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	h, err := b.ledger.Get(p.ID, c.ID)
	if err != nil {
		return err
	}
	if _, l := h.Snapshot(); l == nil {
		err = b.redefineMemory(ctx, p, c, h)
	} else {
		err = b.updateRunning(ctx, p, c, h)
	}
	if err != nil {
		return fmt.Errorf("update container %s: %w", c.ID, err)
	}
	return fpUpdated.Hit(ctx)
}

// redefineMemory gives a machine that is not running the requested memory for its next start.
func (b *Backend) redefineMemory(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, h *handle) error {
	s, _ := h.Snapshot()
	memory := b.memory(sandbox.Resources(p, c))
	if memory == s.Definition.Memory {
		return nil
	}
	if s.Definition.UEFI != nil {
		if err := checkUEFIMemory(memory); err != nil {
			return err
		}
	}
	s.Definition.Memory, s.Definition.Saved = memory, "" // a template has the earlier memory
	if err := b.cfg.Driver.Define(ctx, s.Definition); err != nil {
		return fmt.Errorf("change the machine's memory: %w", err)
	}
	return h.Set(func(now *state) { now.Definition.Memory, now.Definition.Saved = memory, "" })
}

// updateRunning changes a running machine. The cgroup always has room for the guest's memory: it grows before the guest
// and shrinks after it.
func (b *Backend) updateRunning(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, h *handle) error {
	s, _ := h.Snapshot()
	res := sandbox.Resources(p, c)
	memory := b.memory(res)
	if err := checkMost(memory, s.Definition); err != nil {
		return err
	}
	now, err := b.cgroups.Memory(s.Definition.Cgroup)
	if err != nil {
		return err
	}
	if memory >= now {
		if err := b.cgroups.Limit(s.Definition.Cgroup, memory, res); err != nil {
			return err
		}
		return b.cfg.Driver.SetMemory(ctx, h.ID, memory)
	}
	if err := b.cfg.Driver.SetMemory(ctx, h.ID, memory); err != nil {
		return err
	}
	if err := stats.CheckShrink(s.Definition.Cgroup, int64(memory+b.cfg.VM.MemoryOverhead)); err != nil {
		return err
	}
	return b.cgroups.Limit(s.Definition.Cgroup, memory, res)
}

// checkMost refuses a running machine's memory in bytes that is more than it can have.
func checkMost(memory uint64, d machine.Definition) error {
	most := d.MostMemory()
	switch {
	case memory <= most:
		return nil
	case d.Growth != nil:
		return fields.Unsupported("linux.resources.memory_limit_in_bytes", "%d is more than the %d bytes to which the machine can grow", memory,
			most)
	}
	return fields.Unsupported("linux.resources.memory_limit_in_bytes",
		"%d is more than the %d bytes that the guest was started with; a machine gets more memory only when it starts", memory, most)
}
