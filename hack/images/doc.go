// Command images builds the container images that the tests and the demo run, and serves them.
//
//	images [build]          build them into build/images, unless nothing has changed
//	images list             print NAME DIGEST, one image a line
//	images serve ADDR       serve them on ADDR until a signal (docker-registry with a copy, so pushing is safe)
//	images push ADDR        push them to a registry
//	images hosts ADDR DIR   write DIR/_default/hosts.toml, which redirects pulls from every registry to ADDR
//
// Commands other than build do not look for changes, because asking apt for updates takes a second or two. They build
// only if nothing has been built yet.
//
// Many images have the names of public images that CRI test suites and Kubernetes' node tests pull, so that the tests
// run with a mirror, without the internet. Their content is Debian's busybox, nginx and curl, extracted from the
// packages without installing them; small Go programs; and Kubernetes' agnhost once hack/kube.sh has built it. The
// components of examples/wasm are included as artifacts, and so are disks and kernels for virtual machines, made from
// Debian's kernel packages. The same packages and sources always give the same digests: all files have the same date
// and a fixed order, and nothing is copied from the host.
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
// read packages, bootdisk.go makes a disk, store.go writes and pushes. guest contains what virtual machines run.
package main
