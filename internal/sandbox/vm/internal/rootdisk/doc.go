// Package rootdisk keeps a machine's root disk on a block device of the node. It copies the image to the device once;
// the guest's writes survive the pod.
//
//	0        512      256 KiB          1 MiB                      the device's end
//	┌────────┬────────┬────────────────┬───────────────────────────────┐
//	│ mark   │ unused │ UEFI variables │ the disk as the guest sees it │
//	└────────┴────────┴────────────────┴───────────────────────────────┘
//
// The mark fits in one sector, so a write of the mark is atomic:
//
//	(none) ──▶ writing ──fsync──▶ the image is copied ──fsync──▶ complete ──fsync──▶ bootable
//	              ▲                       │
//	              └── power loss, kill ───┘  the copy restarts
//
// A complete device keeps its disk. A device with other content is refused, unless the caller allows Prepare to
// overwrite it. During the copy the device is open exclusively and locked against QEMU.
//
// The mark has the size of the UEFI variables (NVRAM), so a copy begins without any. KeepVars writes the firmware's
// template there before the disk first boots by UEFI. From then on only the machine's firmware and guest write to them,
// unless KeepVars finds their headers damaged.
//
// The package knows nothing about pods or machines, and does not format or partition devices.
package rootdisk
