// Package bootdisk detects two defects of a disk that a BIOS misses: a boot sector without code, which disks for UEFI
// have and to which the BIOS would jump, and partitions that reach beyond the end of a truncated disk. Begin with
// Inspect.
//
// It reads the boot sector and the GUID partition table, but no file systems. It does not report a missing boot sector,
// because the firmware does. It knows neither images nor pods, and decides nothing.
//
// Sources: UEFI specification 2.10, chapter 5 (GPT, protective MBR); SeaBIOS, src/boot.c (boot_disk).
package bootdisk
