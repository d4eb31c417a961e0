// Command images builds the container images that the tests and the demo run, and serves them.
//
//	images [build]          build the images into build/images, unless nothing has changed
//	images list             print NAME DIGEST, one image a line
//	images serve ADDR       serve the images on ADDR until a signal (docker-registry on a copy, so pushing is safe)
//	images push ADDR        push the images to a registry
//	images hosts ADDR DIR   write DIR/_default/hosts.toml, which redirects pulls from every registry to ADDR
//	images guest DIR INIT PROGRAM
//	                        build the guest of OCI pods into DIR, which is no image (hack/guest.sh)
//
// Only the command build looks for changes, because asking apt for updates takes a second or two. The other commands
// build only if nothing has been built yet.
//
// Many images have the names of public images that CRI test suites and Kubernetes' node tests pull, so that these tests
// need only a mirror and no internet. The content of the images is busybox, nginx and curl from Debian's packages
// (extracted, not installed), small Go programs, and Kubernetes' agnhost if hack/kube.sh has built it. The components
// of examples/wasm are included as artifacts. Disks and kernels for virtual machines are included too; they are made
// from Debian's kernel packages. The same packages and sources always give the same digests: all files have the same
// date and a fixed order, and nothing is copied from the host.
//
//	build/images/debs/       the packages
//	build/images/vm/         kernels, initramfs and a disk for tests that need no registry
//	build/images/oci/        one OCI image layout with all images, by org.opencontainers.image.ref.name
//	build/images/registry/   docker-registry's storage with all images (pushed by skopeo)
//	build/images/images.txt  NAME DIGEST
//	build/images/images.yaml for critest's --test-images-file
//	build/images/key         the inputs of the build; written last
//
// set.go, kubernetes.go, components.go, vm.go and tiny.go list the images. tree.go makes layers, debs.go and kernel.go
// read packages, bootdisk.go makes a disk, store.go writes and pushes images. The directory guest contains what virtual
// machines run.
package main
