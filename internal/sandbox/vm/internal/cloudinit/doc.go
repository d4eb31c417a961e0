// Package cloudinit makes the disk that configures a machine's guest at its first boot: NoCloud (label cidata) or
// ConfigDrive (label config-2), as described at https://cloudinit.readthedocs.io. Begin with Build.
//
//	annotations.Options ─┐                       ┌─ meta-data        hostname, instance-id, SSH keys
//	environment          │                       ├─ user-data        the pod's, with write_files and mounts
//	mounts (read here) ──┼─▶ Build ─▶ iso9660 ───┼─ vendor-data      links to block devices, the agent
//	NICs, DNS            │                       └─ network-config   version 2
//	block devices ───────┘
//
// Single files are copied into the guest by write_files. Directories are shares that the guest mounts. Without
// virtio-fs, the files in Secret, ConfigMap, downward API and projected volumes are also copied. ConfigMaps and Secrets
// that annotations refer to are read from the pod's mounts (findSource), because the node cannot query an API server.
//
// A text that becomes part of another language (shell, YAML, JSON, fstab, environment.d) is quoted or refused. Only
// encoders write YAML and JSON. Files are read with limits, and never outside their volume.
//
// User-data that are not a mapping, such as a script, are kept byte for byte. They and our cloud-config become parts of
// a MIME multi-part message (joinParts).
//
// Only Image.WriteFile may write files. The package does not decide which devices or networks a machine has.
package cloudinit
