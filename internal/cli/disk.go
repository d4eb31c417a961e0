package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cri"
	"github.com/tripod-run/tripod/internal/keys"
)

// DiskCommand returns the command for the disks of running machines.
func (a *App) DiskCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "disk", Short: "Attach, detach or list the disks that machines get while they run",
		Long: `Attach block devices of the node to running virtual machines of the handler vm, detach them, or list them. Such a disk is gone when the
machine ends: it stays when the guest reboots, but a restarted container is a new machine.`,
	}
	c.AddCommand(a.attachDiskCommand(), a.detachDiskCommand(), a.listDisksCommand())
	for _, sub := range c.Commands() {
		a.endpointFlag(sub)
		sub.Flags().DurationVar(&a.timeout, "timeout", 2*time.Minute, "time limit of one call")
	}
	return c
}

func (a *App) attachDiskCommand() *cobra.Command {
	readOnly := false
	c := &cobra.Command{
		Use: "attach POD NAME PATH", Short: "Attach a block device to a running machine",
		Long: `Attach the block device PATH of the node to a pod's running machine. The guest sees a SCSI disk with the serial number NAME, in most systems
/dev/disk/by-id/scsi-0QEMU_QEMU_HARDDISK_NAME. NAME has at most 20 letters, digits, - and _. A device that the node has mounted can
only be attached with --read-only. A repeated command completes one that was interrupted.`,
		Args: cobra.ExactArgs(3), ValidArgsFunction: a.completion(podWords),
		RunE: func(c *cobra.Command, args []string) error {
			path, err := filepath.Abs(args[2])
			if err != nil {
				return err
			}
			if readOnly {
				path += cri.DiskReadOnly
			}
			return a.changeDisk(c, args[0], args[1], path)
		},
	}
	c.Flags().BoolVar(&readOnly, "read-only", false, "the guest cannot write to the disk")
	return c
}

func (a *App) detachDiskCommand() *cobra.Command {
	return &cobra.Command{
		Use: "detach POD NAME", Short: "Take a disk away from a running machine",
		Long: `Take the disk NAME away from a pod's running machine. The guest is not asked: unmount the disk there first. A repeated command completes one
that was interrupted.`,
		Args: cobra.ExactArgs(2), ValidArgsFunction: a.completion(podWords),
		RunE: func(c *cobra.Command, args []string) error { return a.changeDisk(c, args[0], args[1], "") },
	}
}

func (a *App) listDisksCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls POD", Short: "List the disks that were attached to a running machine",
		Long: `List the disks that were attached to a pod's running machine. A disk that stays in the phase attaching or detaching belongs to a command that
was interrupted: repeat it.`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completion(podWords),
		RunE: func(c *cobra.Command, args []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error { return a.listDisks(ctx, client, args[0]) })
		},
	}
}

// changeDisk attaches the device with the given path to a pod's machine, or detaches it if the path is "".
func (a *App) changeDisk(c *cobra.Command, pod, name, path string) error {
	return a.withClient(c, func(ctx context.Context, client *Client) error {
		id, err := client.machine(ctx, pod)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, a.timeout)
		defer cancel()
		_, err = runtimeapi.NewRuntimeServiceClient(client.conn).UpdateContainerResources(ctx, &runtimeapi.UpdateContainerResourcesRequest{
			ContainerId: id, Annotations: map[string]string{keys.VMDisk + name: path},
		})
		return err
	})
}

func (a *App) listDisks(ctx context.Context, client *Client, pod string) error {
	id, err := client.machine(ctx, pod)
	if err != nil {
		return err
	}
	resp, err := client.ContainerStatus(ctx, id, true)
	if err != nil {
		return err
	}
	var info struct {
		Disks []struct {
			Name, Path, Phase string
			ReadOnly          bool
		}
	}
	if err := json.Unmarshal([]byte(resp.GetInfo()["info"]), &info); err != nil {
		return fmt.Errorf("the disks of container %s are unknown: %w", shortID(id), err)
	}
	t := newTable(a.Stdout, "NAME", "PATH", "ACCESS", "PHASE")
	for _, d := range info.Disks {
		access := "read-write"
		if d.ReadOnly {
			access = "read-only"
		}
		t.row(d.Name, d.Path, access, d.Phase)
	}
	return t.flush()
}

// machine returns the ID of the newest attempt of a pod's container, if the pod has only one container.
func (c *Client) machine(ctx context.Context, pod string) (string, error) {
	id, err := c.Pod(ctx, pod)
	if err != nil {
		return "", err
	}
	containers, err := c.ListContainers(ctx, &runtimeapi.ContainerFilter{PodSandboxId: id})
	if err != nil {
		return "", err
	}
	names := map[string]bool{}
	for _, k := range containers {
		names[k.GetMetadata().GetName()] = true
	}
	if len(names) != 1 {
		return "", fmt.Errorf("pod %s has %d containers; a virtual machine of the handler vm has one", pod, len(names))
	}
	return choose(pod, "", containers)
}
