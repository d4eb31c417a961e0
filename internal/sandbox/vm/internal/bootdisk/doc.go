// Package bootdisk finds out whether a disk boots by UEFI only, and detects two disk defects that a BIOS misses. The first
// is a boot sector without code, as on disks for UEFI; a BIOS would jump to it. The second is a partition that reaches
// beyond the end of a truncated disk. Begin with Inspect. For CD-ROM images there is UEFIOnlyCD.
//
// The package reads the boot sector, the GUID partition table and a CD-ROM's boot catalog, but no file systems. It does not report a missing
// boot sector, because the firmware does. The package must not know about images or pods, and only reports what it
// finds.
//
// Sources: UEFI specification 2.10, chapter 5 (GPT, protective MBR); "El Torito" Bootable CD-ROM Format
// Specification 1.0; SeaBIOS, src/boot.c (boot_disk).
package bootdisk
