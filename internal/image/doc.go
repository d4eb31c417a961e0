// Package image is the one image store of the node: it pulls images from registries, keeps them, tells what it has,
// and makes root filesystems of them. It is containerd's storage used as a library, in this process, without its daemon.
//
//	                    Pull                 Get · List · Remove            Prepare · Mounts · View · Release
//	                      │                          │                                    │
//	   flights: one per ref and credentials    index: in memory,                 rootfs: one snapshot
//	                      │                    rebuilt at Open                     per container ID
//	   puller: resolve → manifest → blobs            │                                    │
//	      │         │          │  unpack             │                                    │
//	  registry   manifest   layer applier            │                                    │
//	  (hosts,     (limits,  (limits, digests)        │                                    │
//	   logins)     kind)       │                     │                                    │
//	      ▼                    ▼                     ▼                                    ▼
//	┌──────────────────────── metadata.db: image records, leases, references ──────────────────────────┐
//	│       containerd core/metadata (bbolt); collect marks and sweeps what nothing refers to          │
//	├────────────────────────────────────────┬─────────────────────────────────────────────────────────┤
//	│ content/  blobs by digest, and ingests │ snapshots/  one directory per layer and per container,  │
//	│ that resume (plugins/content/local)    │ overlayfs (plugins/snapshots/overlay)                   │
//	└────────────────────────────────────────┴─────────────────────────────────────────────────────────┘
//
// # Names
//
// An image's ID is the digest of its config, so that one image of two registries is one image here; an artifact, whose
// config need not tell it from others, is named by its manifest's digest. Each image has one record per name in the
// metadata: every tag, every name@digest, and the ID itself, which keeps it when its tags have moved on.
//
// # Kinds
//
// A rootfs is unpacked to snapshots as it arrives. A disk and a component stay blobs. All are stored, listed, removed
// and collected alike; the kind is found from the media types of the manifest, never from a label or a name.
// A component is an artifact (component.go has the layouts), or the .wasm file that a rootfs names as its entrypoint;
// that file becomes a blob of its own when it is first asked for (ComponentBlob), which lives as long as the image.
// Who runs a component holds the image (Hold): its blobs stay until Unhold, whatever becomes of the image.
//
// # Disks
//
// What a virtual machine boots from is a disk artifact, a translated name, or a rootfs with one file below /disk/, with
// /boot/vmlinux and /boot/initrd, or both (Machine tells; disk.go has the layouts). OpenDisk holds the image and opens the
// files, without a mount: a file of a rootfs is opened in the one layer that shows it.
//
//	                 manifest ── media type ──▶ format, compression        never probed afterwards (fault I5)
//	artifact, download   │ layer ── unpacked once, when compressed ──▶ blob ── digest, once per change of the file ──▶ Disk
//	rootfs               └ layers ── /disk/*, /boot/* (openat2, in root) ─── qcow2.Inspect ──────────────────────────▶ Disk, Kernel
//
// A name below Config.Translation.Prefix is no registry's: internal/image/translation leads it to a URL, and the file
// there becomes an image of its own, with a manifest made here (download.go). Its record says by labels of ours where it
// came from, so that a repeated pull asks the server whether it has changed. A half download goes on later only where it
// cannot be of another version, and over a loss of power only where a digest will check it.
//
// # What is believed
//
// Nothing that comes from an image or a registry names anything of ours: labels and annotations of an image are data
// of Image and are never written to a record, a lease or a snapshot. Every blob is checked against its digest before
// it is used; a disk is read for that once, and again when its file was touched. A layer counts as unpacked once an image
// record says so, and that is written only after the file system holding the layer was synced; unpacked layers that no
// record vouches for are removed at Open and unpacked again.
//
// Open looks whether blobs and layers are there, by existence and size; Verify reads them. A pull mends what is damaged: a blob is
// fetched again, and a layer is unpacked again into the directory that it had, for layers and containers above know it by that
// (layerdir.go). What a container has mounted stays beside it.
//
// # Registries
//
// Hosts, mirrors, certificates and plain http come from hosts.toml files (Config.HostsDir, the layout of containerd's
// certs.d, "_default" included). Without one, https is spoken; a registry on a loopback address and a port other than
// 443 is tried with https first and with http when it answers so, which is containerd's rule.
// A login given with a pull goes to the registry that the reference names, or to the one that hosts.toml puts in its
// place as "server"; to a mirror only when the login's ServerAddress names that mirror; to a host that a registry
// redirects to, never.
//
// The package must not know of pods or of the CRI, and keeps no state of containers beyond their snapshots.
package image
