// Package bootdisk looks at the first sectors of a disk for what a BIOS cannot find out: that the boot sector, which it would
// jump to, holds no code, as on disks for UEFI, or that the partitions reach beyond the disk's end, as on one that is cut off.
//
// It reads the boot sector and the GUID partition table, and no file system. A disk without a boot sector is not its business: the
// firmware says so. It knows neither images nor pods, and decides nothing.
//
// Sources: UEFI specification 2.10, chapter 5 (GPT, protective MBR); SeaBIOS, src/boot.c (boot_disk).
package bootdisk
