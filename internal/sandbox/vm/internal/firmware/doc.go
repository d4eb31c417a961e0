// Package firmware reads what a machine's firmware writes to its debug port, and detects a machine that cannot boot.
// Begin with Report.
//
//	SeaBIOS ─ port 0x402 ─▶ isa-debugcon ─▶ ring buffer in QEMU ◀─ machine.Driver.Firmware ─▶ Report.Read
//
// The guest's root can also write to the port. So the ring buffer is bounded, and its content can affect only that
// machine. A firmware that finds nothing to boot tries again every RetryTime, and writes the same output again. So no
// output is lost if a daemon reads it and dies.
//
// The package must not know about drivers or pods. The texts are from SeaBIOS 1.16, src/boot.c.
package firmware
