package qemu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qmp"
)

// plugController is the ID of the SCSI controller for the disks that Plug adds. plugPort is the ID of the PCI port for the
// NICs and the share that a saved machine gets, or for the controller itself.
const plugController, plugPort = "plug", "late"

// unplugTime bounds the wait for QEMU to finish the requests of a disk that is taken away.
const unplugTime = 10 * time.Second

// Plug implements machine.Driver.
func (d *Driver) Plug(ctx context.Context, name string, disk machine.PlugDisk) error {
	r, def, err := d.running(name)
	if err != nil {
		return err
	}
	if !def.Plug && !def.Hotplug {
		return fmt.Errorf("machine %.64s has no place for further disks: %w", name, errdefs.ErrFailedPrecondition)
	}
	if def.Hotplug {
		controller := map[string]any{"driver": "virtio-scsi-pci", "bus": plugPort, "id": plugController}
		if err := r.ask(ctx, "device_add", controller, nil); err != nil && !duplicate(err) {
			return fmt.Errorf("plug in the controller for further disks: %w", err)
		}
	}
	node := plugNodeName(disk.LUN)
	if err := r.plugNode(ctx, node, disk); err != nil {
		return fmt.Errorf("plug in a disk: %w", err)
	}
	device := map[string]any{
		"driver": "scsi-hd", "bus": plugController + ".0", "lun": disk.LUN, "drive": node, "id": "disk-" + node,
		"serial": cmp.Or(disk.Serial, node),
	}
	if disk.LogicalBlock > 0 {
		device["logical_block_size"], device["physical_block_size"] = disk.LogicalBlock, disk.PhysicalBlock
	}
	if disk.ReadOnly {
		device["share-rw"] = true // others can write to the device, for example a container of the same pod
	} else { // as in command.disk
		device["werror"], device["rerror"] = "report", "report"
	}
	if err := r.ask(ctx, "device_add", device, nil); err != nil && !duplicate(err) {
		return fmt.Errorf("plug in a disk: %w", err)
	}
	return nil
}

// plugNodeName returns the name of the block node of a disk with this LUN. It is also the name of its descriptor set.
func plugNodeName(lun int) string { return fmt.Sprintf("plug%d", lun) }

// Unplug implements machine.Driver. Each step does nothing if an earlier call has done it.
func (d *Driver) Unplug(ctx context.Context, name string, lun int) error {
	r, _, err := d.running(name)
	if err != nil {
		return err
	}
	node := plugNodeName(lun)
	if err := r.ask(ctx, "device_del", map[string]any{"id": "disk-" + node}, nil); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("unplug a disk: %w", err)
	}
	if err := r.removeNode(ctx, node); err != nil {
		return fmt.Errorf("unplug a disk: %w", err)
	}
	if err := r.removeSets(ctx, node); err != nil {
		return fmt.Errorf("unplug a disk: %w", err)
	}
	return nil
}

// removeNode removes a block node once no device uses it.
func (r *run) removeNode(ctx context.Context, node string) error {
	ctx, cancel := context.WithTimeout(ctx, unplugTime)
	defer cancel()
	for {
		exists, err := r.hasNode(ctx, node)
		if err != nil || !exists {
			return err
		}
		refused := r.ask(ctx, "blockdev-del", map[string]any{"node-name": node}, nil)
		if refused == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return refused
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// removeSets makes QEMU close its descriptors of a disk's file.
func (r *run) removeSets(ctx context.Context, node string) error {
	var sets []struct {
		ID  int `json:"fdset-id"`
		FDs []struct {
			Opaque string `json:"opaque"`
		} `json:"fds"`
	}
	if err := r.execute(ctx, "query-fdsets", &sets); err != nil {
		return err
	}
	for _, set := range sets {
		if len(set.FDs) > 0 && set.FDs[0].Opaque == node {
			if err := r.ask(ctx, "remove-fd", map[string]any{"fdset-id": set.ID}, nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// hasNode reports whether QEMU has a block node.
func (r *run) hasNode(ctx context.Context, node string) (bool, error) {
	var nodes []struct {
		Name string `json:"node-name"`
	}
	if err := r.ask(ctx, "query-named-block-nodes", map[string]any{"flat": true}, &nodes); err != nil {
		return false, err
	}
	for _, n := range nodes {
		if n.Name == node {
			return true, nil
		}
	}
	return false, nil
}

// plugNode adds a block node for a disk's file, which QEMU receives as a descriptor, unless the node exists.
func (r *run) plugNode(ctx context.Context, node string, disk machine.PlugDisk) error {
	if exists, err := r.hasNode(ctx, node); err != nil || exists {
		return err
	}
	info, err := disk.File.Stat()
	if err != nil {
		return err
	}
	driver := "file"
	if info.Mode()&os.ModeDevice != 0 {
		driver = "host_device"
	}
	var set struct {
		ID int `json:"fdset-id"`
	}
	if err := r.askFile(ctx, "add-fd", map[string]any{"opaque": node}, disk.File, &set); err != nil {
		return err
	}
	err = r.ask(ctx, "blockdev-add", map[string]any{
		"driver": "raw", "node-name": node, "read-only": disk.ReadOnly, "discard": "unmap",
		"file": map[string]any{"driver": driver, "filename": fmt.Sprintf("/dev/fdset/%d", set.ID), "read-only": disk.ReadOnly,
			"discard": "unmap"},
	}, nil)
	if err != nil {
		return errors.Join(err, r.ask(context.WithoutCancel(ctx), "remove-fd", map[string]any{"fdset-id": set.ID}, nil))
	}
	return nil
}

// duplicate reports whether QEMU has refused a device because one with its ID exists.
func duplicate(err error) bool {
	var refused *qmp.Error
	return errors.As(err, &refused) && strings.HasPrefix(refused.Desc, "Duplicate device ID")
}
