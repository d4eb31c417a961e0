// Package bootdisk finds out whether a disk boots by UEFI only, and detects two disk defects that a BIOS misses. The first
// is a boot sector without code, as on disks for UEFI; a BIOS would jump to it. The second is a partition that reaches
// beyond the end of a truncated disk. Begin with Inspect.
//
// The package reads the boot sector and the GUID partition table, but no file systems. It does not report a missing
// boot sector, because the firmware does. The package must not know about images or pods, and only reports what it
// finds.
//
// Sources: UEFI specification 2.10, chapter 5 (GPT, protective MBR); SeaBIOS, src/boot.c (boot_disk).
package bootdisk
