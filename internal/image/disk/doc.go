// Package disk knows the disks of virtual machines: their layouts in images, their formats, and the root disks that are
// made of root filesystems.
//
//	artifact   manifest ── LayerOf ──▶ Layer ── Unpack, when compressed ──▶ Files   format by media type (fault I5)
//	download   file ── Sniff ──▶ media type, once; the manifest records it
//	rootfs     mounts of a view ── Open ──▶ Files: /disk/*, /boot/* (find.go), opened in their layers
//	           root ── MakeErofs ──▶ root disk (erofs.go)
//
// A guest must not choose its disk's format, so a format is never guessed from content that a guest has written. Files of
// other formats are refused, because they would not boot (foreign.go). Zeros take no space (holes.go).
//
// The package must not know the image store: its callers hold what is open.
//
// # Subpackages
//
//	qcow2   reads and checks the headers of disks, and makes overlays
package disk
