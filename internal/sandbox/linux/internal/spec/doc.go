// Package spec turns the CRI v1 configuration of a pod's container into an OCI runtime specification for crun and runc.
//
//	PodSandboxConfig ─┐              ┌─▶ specs.Spec        config.json of the bundle
//	ContainerConfig ──┼─▶  Build  ───┤
//	image config ─────┤              └─▶ sandbox.Resolved  user, mounts, stop signal for the record
//	Host (Probe) ─────┘
//
// The package decides what every field of LinuxContainerSecurityContext, LinuxSandboxSecurityContext,
// LinuxContainerResources, Mount, Device and KeyValue means on this kind of node. A field is enforced or rejected by
// name, never ignored (Validate), except for the fields in Harmless.
//
// The package must not run programs, keep state, or know where bundles, cgroups and namespaces are: the caller passes
// paths. It reads the container's root file system and the host's /dev, /proc and /sys. It creates nothing except
// missing directories: the image's volumes in the root file system, and the host directories of bind mounts.
//
// Paths that an image or a pod names inside the root file system are opened below its root (openat2 with
// RESOLVE_IN_ROOT), checked for their type, and read up to a limit.
//
// The specification has version 1.0.2, which runc 1.1 and crun 1.8 both accept. Resources use the specification's
// cgroup v1 terms on cgroup v2 too, because the OCI runtime converts them; only LinuxContainerResources.unified is
// passed on unchanged.
package spec
