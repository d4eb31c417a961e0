// Package mnt makes and removes the mounts of pods and containers: layers and views of images, tmpfs, and clones of the
// node's mounts. Begin with Mount, or with MappedLayer for a pod with a user namespace.
//
//	                 without a user namespace   with one
//	layer of image   Mount                      MappedLayer: mapped clones of the lower layers below an overlay
//	view of image    Mount                      MappedView
//	volume           the OCI runtime's          Expose: a clone, which the pod's root can reach
//
// Every function can be repeated after a crash. Nothing below a mount is ever deleted: what removes a mount's directory
// fails if something is still mounted there.
//
// The package must not know how images are stored or which pods there are. It is given mounts, directories and an open
// user namespace.
package mnt
