// Package rootdisk keeps a machine's root disk on a block device of the node: the image is copied onto it once, and what the
// guest writes stays when its pod goes.
//
//	0        512                 1 MiB                            the device's end
//	┌────────┬───────────────────┬─────────────────────────────────────┐
//	│ mark   │ nothing           │ the disk as the guest sees it       │
//	└────────┴───────────────────┴─────────────────────────────────────┘
//
// The mark is one sector, so that it is written whole or not at all:
//
//	(none) ──▶ writing ──fsync──▶ the image is copied ──fsync──▶ complete ──fsync──▶ it can be booted
//	              ▲                       │
//	              └── power loss, kill ───┘  the copy starts again
//
// A device that is complete keeps its disk, and one that holds anything else is refused, unless the caller says what may be
// overwritten. While the image is copied, nobody else can claim the device, and QEMU does not get its locks.
//
// The package must not know pods or machines, nor format or partition anything.
package rootdisk
