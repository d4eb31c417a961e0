// Package cloudinit makes the disk by which a VM learns who it is: NoCloud (label cidata) or ConfigDrive (label config-2),
// as https://cloudinit.readthedocs.io describes them.
//
//	annotations.Options ─┐                       ┌─ meta-data        hostname, instance-id, SSH keys
//	environment          │                       ├─ user-data        what the pod says, write_files, mounts
//	mounts (read here) ──┼─▶ Build ─▶ iso9660 ───┼─ vendor-data      links to block devices, the agent
//	NICs, DNS            │                       └─ network-config   version 2
//	block devices ───────┘
//
// Files of Secret, ConfigMap, downward API and projected volumes and single files are copied into the guest by write_files;
// other directories are shares (virtio-9p) that the guest mounts. ConfigMaps and Secrets named by annotations are served
// from the pod's mounts, as the runtime has no credentials for an API server; see find.
//
// Where text of one language is put into another (shell, YAML, JSON, fstab, environment.d), it is quoted or refused; YAML and
// JSON are written by encoders only. Files are read with bounds and never outside of the volume that they belong to.
//
// The package must not write anything but what Image.WriteFile is asked for, and decides nothing about devices or networks.
package cloudinit
