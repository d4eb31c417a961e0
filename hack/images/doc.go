// Command images builds the container images that the tests and the demo run, and serves them.
//
//	images [build]          build them into build/images, unless nothing has changed
//	images list             print NAME DIGEST, one image a line
//	images serve ADDR       serve them on ADDR (docker-registry, a copy that may be pushed to) until told to end
//	images push ADDR        push them to a registry
//	images hosts ADDR DIR   write DIR/_default/hosts.toml, which sends every registry's pulls to ADDR
//
// The others build only what was never built: asking apt whether there is something newer takes a second or two.
//
// Many carry the names of public images that CRI test suites and Kubernetes' node specs pull, so that these run here
// without the internet, through a mirror. They hold Debian's busybox, nginx and curl, taken from their packages without
// installing them, small Go programs, and Kubernetes' agnhost once hack/kube.sh has built it; the components of
// examples/wasm are artifacts among them, and so are disks and kernels of virtual machines, out of Debian's kernel packages.
// The same packages and sources give the same digests: every file has the same date and order, and nothing of the host is
// copied.
//
//	build/images/debs/       the packages
//	build/images/vm/         kernels, initramfs and a disk for tests that need no registry
//	build/images/oci/        one OCI image layout that holds them all, by org.opencontainers.image.ref.name
//	build/images/registry/   docker-registry's storage with them all pushed to it (by skopeo)
//	build/images/images.txt  NAME DIGEST
//	build/images/images.yaml what critest takes as --test-images-file
//	build/images/key         what they were built from; written last
//
// set.go, kubernetes.go, components.go, vm.go and tiny.go are the list of images; tree.go makes layers, debs.go and kernel.go
// read packages, bootdisk.go makes a disk, store.go writes and pushes. guest holds what the machines' guest runs.
package main
