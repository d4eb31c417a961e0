// Vmbench compares machines with a QEMU started by hand, with the same kernel, initramfs, memory, accelerator and
// cloud-init data.
//
//	vmbench ──CRI──► pods of the test guest (hack/images/guest): StartContainer … the line in the container's log
//	    └── exec ──► qemu-system-x86_64 -kernel … -serial stdio:                … the line on its standard output
//
// It alternates between the two, so that a change of the host's load affects both. The report is Markdown on stdout.
package main
