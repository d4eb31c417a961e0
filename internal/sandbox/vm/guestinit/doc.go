// Package guestinit implements tripod-init, the first process (PID 1) of a guest that runs OCI containers. Begin with
// Run.
//
//	kernel ──▶ Run: root disk, mounts, modules, cgroups, lo, host name ──▶ tripod-guest (started again when it ends)
//	                                                                   └── reaps orphans until the machine is killed
//
// A step that fails is reported on the console and does not stop the boot: the host learns more from a guest that runs
// than from a kernel panic. Modprobe is what the running kernel uses to load modules.
//
// The package knows nothing of pods. It must import neither fmt nor any package of Tripod,
// because it must start fast in an emulated machine.
package guestinit
