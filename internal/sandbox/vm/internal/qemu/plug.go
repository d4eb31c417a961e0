package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qmp"
)

// plugController is the ID of the SCSI controller for the disks that Plug adds. plugPort is the ID of the PCI port for the
// NICs and the share that a saved machine gets.
const plugController, plugPort = "plug", "late"

// Plug implements machine.Driver.
func (d *Driver) Plug(ctx context.Context, name string, disk machine.PlugDisk) error {
	r, def, err := d.running(name)
	if err != nil {
		return err
	}
	if !def.Plug {
		return fmt.Errorf("machine %.64s has no controller for further disks: %w", name, errdefs.ErrFailedPrecondition)
	}
	node := fmt.Sprintf("plug%d", disk.LUN)
	if err := r.plugNode(ctx, node, disk); err != nil {
		return fmt.Errorf("plug in a disk: %w", err)
	}
	device := map[string]any{
		"driver": "scsi-hd", "bus": plugController + ".0", "lun": disk.LUN, "drive": node, "id": "disk-" + node, "serial": node,
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

// plugNode adds a block node for a disk's file, which QEMU receives as a descriptor, unless the node exists.
func (r *run) plugNode(ctx context.Context, node string, disk machine.PlugDisk) error {
	var nodes []struct {
		Name string `json:"node-name"`
	}
	if err := r.ask(ctx, "query-named-block-nodes", map[string]any{"flat": true}, &nodes); err != nil {
		return err
	}
	for _, n := range nodes {
		if n.Name == node {
			return nil
		}
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
		"file": map[string]any{"driver": driver, "filename": fmt.Sprintf("/dev/fdset/%d", set.ID), "read-only": disk.ReadOnly, "discard": "unmap"},
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
