// Package spec turns the configuration of a pod's container, as CRI v1 gives it, into an OCI runtime
// specification that crun and runc carry out.
//
//	PodSandboxConfig ─┐              ┌─▶ specs.Spec        config.json of the bundle
//	ContainerConfig ──┼─▶  Build  ───┤
//	image config ─────┤              └─▶ sandbox.Resolved  user, mounts, stop signal for the record
//	Host (Probe) ─────┘
//
// It owns the meaning of every field of LinuxContainerSecurityContext, LinuxSandboxSecurityContext,
// LinuxContainerResources, Mount, Device and KeyValue on this kind of node, and the refusal of what cannot be
// meant here: a field is enforced or refused by name, never ignored (Validate). What is sent with every pod and
// is harmless to lack is accepted: see Harmless.
//
// It must not run anything, keep anything, or know where bundles, cgroups and namespaces lie: the caller hands in
// paths. Its effects are reading the container's root file system and the host's /dev, /proc and /sys, and
// making the host directory of a bind mount that does not exist yet.
//
// Everything that an image or a pod names inside the root file system is opened below it (openat2 with
// RESOLVE_IN_ROOT), checked to be what it should be, and read up to a bound.
//
// The specification is written as version 1.0.2, which runc 1.1 and crun 1.8 both take; nothing newer is used.
// On cgroup v2 resources are still written in the v1 terms of the specification, since converting them is the
// OCI runtime's task; LinuxContainerResources.unified is passed on top of them.
package spec
