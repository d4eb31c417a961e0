// Package volumes converts a container's mounts and devices to what a machine can have: shared directories, disks, and files
// that cloud-init writes. Begin with Of. The package must not make files or mounts, and it does not know the driver that runs
// the machine.
package volumes
