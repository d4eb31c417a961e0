// Package oci runs the OCI containers of a pod in a machine of the pod's own. Begin with Open, and with Backend.CreateSandbox.
//
//	node ──▶ Backend ── machines ──▶ vm.Backend ──▶ machine.Driver ──▶ QEMU
//	            │                        │
//	            │ guestapi               ▼
//	            └──────────▶ tripod-guest in the machine ──▶ the backend for Linux containers
//
// The package knows package vm by the interface machines only: it creates, starts, stops and removes unit pods whose single
// container is the pod's machine, as the node does with unit pods of its own, and asks for what such a machine is and has: its
// definition, agent, network interfaces, driver and cgroups. Package vm does not know that there are containers in a machine.
//
// Each file has one part: the machines (machine.go), their sizes and CPUs (size.go, place.go), the calls in a guest and the events
// from it (guest.go), the containers (container.go, start.go, update.go), volumes, disks and statistics.
//
// A guest is not trusted. What it sends is bounded, and numbers and words that cannot be true are replaced before they are
// recorded or reported. The package must not decide states (the node does) or unpack images (the image service makes disks of
// them).
//
// # Subpackages
//
//	internal/guestlog    copies the log of a container from the guest
package oci
