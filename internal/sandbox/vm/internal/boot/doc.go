// Package boot finds out how a disk boots, and with which firmware. Begin with Inspect for a disk, FindUEFI for the node's UEFI
// firmware, and Report for what a machine's firmware says.
//
// Inspect and UEFIOnlyCD find out whether a disk or a CD-ROM boots by UEFI only. Inspect also detects two defects that a BIOS
// misses. The first is a boot sector without code, as on disks for UEFI; a BIOS would jump to it. The second is a partition that
// reaches beyond the end of a truncated disk. They read the boot sector, the GUID partition table and a CD-ROM's boot catalog,
// but no file systems. A missing boot sector is the firmware's to report.
//
// A BIOS writes to its debug port:
//
//	SeaBIOS ─ port 0x402 ─▶ isa-debugcon ─▶ ring buffer in QEMU ◀─ machine.Driver.Firmware ─▶ Report.Read
//
// The guest's root can also write to the port. So the ring buffer is bounded, and its content can affect only that
// machine. A firmware that finds nothing to boot tries again every RetryTime, and writes the same output again. So no
// output is lost if a daemon reads it and dies.
//
// A UEFI firmware writes to the serial console, where its output remains; OfConsole reads the beginning of a run's output.
// A guest that writes the same text there can end only its own machine.
//
// The package must not know about drivers, images or pods, and only reports what it finds. The texts are from SeaBIOS 1.16,
// src/boot.c, and from EDK II 2022.11, MdeModulePkg/Library/UefiBootManagerLib and ShellPkg. The descriptors are those of QEMU,
// docs/interop/firmware.json. The formats of disks are from the UEFI specification 2.10, chapter 5 (GPT, protective MBR), and the
// "El Torito" Bootable CD-ROM Format Specification 1.0.
package boot
