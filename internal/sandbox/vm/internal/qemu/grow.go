package qemu

import (
	"context"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// growthID is the ID of the virtio-mem device, whose memory backend has the ID growthMemory.
const growthID, growthMemory = "growth", "growth-ram"

// growthRegion is the size in bytes of the region in which a machine's memory can grow.
func growthRegion(d machine.Definition) uint64 {
	return (d.Growth.Memory - d.Growth.Boot) &^ (machine.GrowthUnit - 1)
}

// grown divides a machine's memory in bytes into what it boots with, as far as the balloon leaves it to the guest, and what it
// has grown by.
func grown(d machine.Definition, memory uint64) (boot, growth uint64) {
	if d.Growth == nil || memory <= d.Growth.Boot {
		return memory, 0
	}
	growth = (memory - d.Growth.Boot + machine.GrowthUnit - 1) &^ (machine.GrowthUnit - 1)
	return d.Growth.Boot, min(growth, growthRegion(d))
}

// SetMemory implements machine.Driver.
func (d *Driver) SetMemory(ctx context.Context, name string, memory uint64) error {
	r, def, err := d.running(name)
	if err != nil {
		return err
	}
	boot, growth := grown(def, memory)
	return machine.Memory{
		Set: func(ctx context.Context, memory uint64) error {
			boot, growth := grown(def, memory)
			if def.Growth != nil {
				if err := r.ask(ctx, "qom-set", requestGrowth(growth), nil); err != nil {
					return err
				}
			}
			return r.ask(ctx, "balloon", map[string]any{"value": boot}, nil)
		},
		Actual: func(ctx context.Context) (uint64, error) { return r.memory(ctx, def) },
	}.Change(ctx, boot+growth)
}

// requestGrowth returns the arguments of the command qom-set that asks the guest to grow by so many bytes.
func requestGrowth(growth uint64) map[string]any {
	return map[string]any{"path": "/machine/peripheral/" + growthID, "property": "requested-size", "value": growth}
}

// memory returns the memory in bytes that the guest has: what the balloon leaves of the memory at boot, and what the machine
// has grown by.
func (r *run) memory(ctx context.Context, def machine.Definition) (uint64, error) {
	var balloon struct {
		Actual uint64 `json:"actual"`
	}
	if err := r.execute(ctx, "query-balloon", &balloon); err != nil || def.Growth == nil {
		return balloon.Actual, err
	}
	var devices []struct {
		Data struct {
			ID   string `json:"id"`
			Size uint64 `json:"size"`
		} `json:"data"`
	}
	if err := r.execute(ctx, "query-memory-devices", &devices); err != nil {
		return 0, err
	}
	for _, device := range devices {
		if device.Data.ID == growthID {
			return balloon.Actual + device.Data.Size, nil
		}
	}
	return 0, fmt.Errorf("QEMU has no device %q: %w", growthID, errdefs.ErrInternal)
}

// AddCPUs implements machine.Driver.
func (d *Driver) AddCPUs(ctx context.Context, name string, cpus int) error {
	r, def, err := d.running(name)
	if err != nil {
		return err
	}
	if def.Growth == nil {
		return fmt.Errorf("machine %.64s was not started with room for further CPUs: %w", name, errdefs.ErrNotImplemented)
	}
	var kvm struct {
		Enabled bool `json:"enabled"`
	}
	if err := r.ask(ctx, "query-kvm", nil, &kvm); err != nil {
		return err
	}
	if !kvm.Enabled && !canAddEmulated(def) {
		return fmt.Errorf("machine %.64s is emulated and has %d CPUs; only one with a single CPU gets more: %w", name, def.CPUs,
			errdefs.ErrNotImplemented)
	}
	var slots []struct {
		Type   string         `json:"type"`
		Props  map[string]any `json:"props"`
		Device string         `json:"qom-path"` // of the CPU in the slot; "" if there is none
	}
	if err := r.ask(ctx, "query-hotpluggable-cpus", nil, &slots); err != nil {
		return err
	}
	slices.Reverse(slots) // QEMU lists the last one first
	have := 0
	for _, slot := range slots {
		if slot.Device != "" {
			have++
		}
	}
	for i, slot := range slots {
		if have >= cpus {
			break
		}
		if slot.Device != "" {
			continue
		}
		slot.Props["driver"], slot.Props["id"] = slot.Type, fmt.Sprintf("cpu%d", i)
		if err := r.ask(ctx, "device_add", slot.Props, nil); err != nil {
			return fmt.Errorf("add a CPU: %w", err)
		}
		have++
	}
	if have < cpus {
		return fmt.Errorf("machine %.64s has %d CPUs, its maximum; %d are wanted: %w", name, have, cpus, errdefs.ErrNotImplemented)
	}
	return nil
}
