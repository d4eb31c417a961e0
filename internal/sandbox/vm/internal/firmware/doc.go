// Package firmware finds the node's UEFI firmware (Find). It also reads what a machine's firmware writes, and detects a
// machine that cannot boot. Begin with Report.
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
// The package must not know about drivers or pods. The texts are from SeaBIOS 1.16, src/boot.c, and from EDK II 2022.11,
// MdeModulePkg/Library/UefiBootManagerLib and ShellPkg. The descriptors are those of QEMU, docs/interop/firmware.json.
package firmware
