// Vmbench compares Tripod's machines with a QEMU that was started by hand. Both have the same kernel, initramfs,
// memory, accelerator and cloud-init data.
//
//	vmbench ──CRI──► pods of the test guest (hack/images/guest): StartContainer … the line in the container's log
//	    └── exec ──► qemu-system-x86_64 -kernel … -serial stdio:                … the line on its standard output
//
// Vmbench alternates between the two, so that a change in the host's load affects both. The report is Markdown on
// stdout.
package main
