// Package image is the node's only image store. It pulls images from registries, stores and lists them, and provides
// root filesystems. It uses containerd's storage as a library in this process, without its daemon.
//
//	                    Pull                 Get · List · Remove            Prepare · Mounts · View · Release
//	                      │                          │                                    │
//	   flights: one per ref and credentials    index: in memory,             rootfs: one writable layer
//	                      │                    rebuilt at Open                     per container ID
//	   puller: resolve → manifest → blobs            │                                    │
//	      │         │          │  unpack             │                                    │
//	registry, share  manifest  layer.Applier         │                                    │
//	  (hosts,     (limits,  (limits, digests)        │                                    │
//	logins; peers) kind)       │                     │                                    │
//	      ▼                    ▼                     ▼                                    ▼
//	┌────────────── metadata.db: image records, leases, references ───────────────┐ ┌──────────────────┐
//	│  containerd core/metadata (bbolt); collect marks and sweeps what nothing    │ │ containers/  one │
//	│  refers to                                                                  │ │ directory per    │
//	├────────────────────────────────────────┬────────────────────────────────────┤ │ container, in no │
//	│ content/  blobs by digest, and ingests │ snapshots/  one directory per      │ │ database         │
//	│ that resume (plugins/content/local)    │ layer, and one foundation per      │◄┤ (writable.go,    │
//	│                                        │ image with containers; overlayfs   │ │ places.go)       │
//	└────────────────────────────────────────┴────────────────────────────────────┘ └──────────────────┘
//
// # Names
//
// An image's ID is the digest of its config, so an image that comes from two registries is one image here. An artifact
// is identified by its manifest's digest, because different artifacts can have the same config. Each image has one
// record per name in the metadata: every tag, every name@digest, and the ID itself. The record of the ID keeps the
// image after its tags have moved to other images.
//
// # Kinds
//
// A rootfs is unpacked to snapshots as it arrives; a disk or a component stays a blob. All kinds are stored, listed,
// removed and collected in the same way. The kind follows from the manifest's media types, never from a label or a
// name. A component is an artifact (component.go has the layouts) or the .wasm file that is a rootfs's entrypoint.
// ComponentBlob turns that file into a blob when it is first needed; the blob lives as long as the image. To run a
// component, the caller holds the image (Hold): its blobs stay until Unhold, even if the image is removed.
//
// # Disks
//
// A virtual machine boots from a disk artifact, a translated name, or a rootfs (see Machine; internal/image/disk has the layouts).
// Such a rootfs has one file below /disk/, or has /boot/vmlinux and /boot/initrd, or has both. OpenDisk holds the image
// and opens the files without a mount: a file of a rootfs is opened directly in the layer that provides it.
//
//	                 manifest ── media type ──▶ format, compression        never probed afterwards (fault I5)
//	artifact, download   │ layer ── unpacked once, when compressed ──▶ blob ── digest, once per change to the file ──▶ Disk
//	rootfs               └ layers ── /disk/*, /boot/* (openat2, in root) ─── qcow2.Inspect ──────────────────────────▶ Disk, Kernel
//
// A name below Config.Translation.Prefix belongs to no registry. internal/download/translation maps it to a URL, and the
// file there becomes an image with a manifest made here (downloaded.go). The labels of its record say where it came from,
// so a repeated pull asks the server whether the file has changed. An interrupted download resumes only if the server
// certainly has the same version of the file, and after a reboot only if the result is checked against a digest.
//
// A machine that runs containers gets their images as root disks: OpenRootDisk makes one EROFS image per rootfs, by
// mkfs.erofs in a mount namespace of its own (disk/erofs.go). The disk is a blob to which a label of the manifest refers,
// so it lives as long as the image or a key of OpenRootDisk, and is found again after a restart.
//
// # Trust
//
// Images and registries cannot influence the store's own records: an image's labels and annotations are data in Image
// and are never written to a record, a lease or a snapshot. Every blob is checked against its digest before use; for a
// disk, this check is repeated only after its file has changed. A layer counts as unpacked once an image record refers
// to it. The record is written only after the layer's file system has been synced. Open removes unpacked layers without
// a record; the next pull unpacks them again.
//
// Open checks that blobs exist and have the right size, and that layers exist; Verify also reads them. A pull repairs
// damage: it fetches a blob again, and unpacks a layer again into its existing directory, because layers and containers
// above refer to that directory (layerdir.go). The damaged directory is kept beside its replacement, because containers
// may have mounted it.
//
// The package must not know about pods or the CRI, and keeps no state of containers beyond their layers.
//
// # Subpackages
//
//	disk               knows the layouts and formats of machines' disks, and makes root disks
//	internal/download  fetches files of translated names
//	internal/failure   has the errors that the rooms share, and their classes
//	internal/layer     applies layers, and opens files of unpacked images
//	internal/readers   has the readers that blobs pass through
//	internal/share     exchanges images with other nodes
//	policy             decides by signatures which images may run
//	registry           reaches registries: hosts.toml, logins, TLS
package image
