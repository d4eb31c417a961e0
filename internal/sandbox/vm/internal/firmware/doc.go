// Package firmware reads what a machine's firmware says on its debug port, and so learns that a machine cannot boot.
//
//	SeaBIOS ─ port 0x402 ─▶ isa-debugcon ─▶ ring buffer in QEMU ◀─ machine.Driver.Firmware ─▶ Report.Read
//
// The port is there for as long as the machine, and a guest's root may write to it: the ring buffer is bounded, and nothing is
// believed of it but what concerns that machine. A firmware that finds nothing to boot tries again every RetryTime, and says so
// again: what was read by a daemon that died is not lost.
//
// The package knows neither drivers nor pods. Source of the texts: SeaBIOS 1.16, src/boot.c.
package firmware
