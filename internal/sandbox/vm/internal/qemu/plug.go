package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qmp"
)

// plugController is the ID of the SCSI controller for the disks that Plug adds. plugPort is the ID of the PCI port for the
// NICs and the share that a saved machine gets.
const plugController, plugPort = "plug", "late"

// Plug implements machine.Driver.
func (d *Driver) Plug(ctx context.Context, name string, lun int, file *os.File) error {
	r, def, err := d.running(name)
	if err != nil {
		return err
	}
	if !def.Plug {
		return fmt.Errorf("machine %.64s has no controller for further disks: %w", name, errdefs.ErrFailedPrecondition)
	}
	node := fmt.Sprintf("plug%d", lun)
	if err := r.plugNode(ctx, node, file); err != nil {
		return fmt.Errorf("plug in a disk: %w", err)
	}
	err = r.ask(ctx, "device_add", map[string]any{
		"driver": "scsi-hd", "bus": plugController + ".0", "lun": lun, "drive": node, "id": "disk-" + node, "serial": node,
	}, nil)
	if err != nil && !duplicate(err) {
		return fmt.Errorf("plug in a disk: %w", err)
	}
	return nil
}

// plugNode adds a block node for a file, which QEMU receives as a descriptor, unless the node exists.
func (r *run) plugNode(ctx context.Context, node string, file *os.File) error {
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
	var set struct {
		ID int `json:"fdset-id"`
	}
	if err := r.askFile(ctx, "add-fd", map[string]any{"opaque": node}, file, &set); err != nil {
		return err
	}
	err := r.ask(ctx, "blockdev-add", map[string]any{
		"driver": "raw", "node-name": node, "read-only": true,
		"file": map[string]any{"driver": "file", "filename": fmt.Sprintf("/dev/fdset/%d", set.ID), "read-only": true},
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
