// Package console connects a machine's serial console to a container's log and to attached clients. Begin with Open.
//
//	QEMU ──▶ serial log (a file to which QEMU always appends)
//	  ▲          │ tail, woken by inotify
//	  │          ├─▶ relay ──▶ the container's log, in the CRI's format
//	  │          │     └─ state file: the offsets in both logs; copied parts of the serial log are punched out
//	  │          └─▶ hub ──▶ attached clients
//	  └─ serial input ◀─┘ ◀── their input
//
// # Exactly once
//
// The relay copies a piece of the serial log to the container's log, as entries, and then commits the offsets in both
// files to the state file. A daemon that dies in between leaves uncommitted entries. The next daemon cuts off these
// entries and writes them again from the serial log. So after SIGKILL at any point, no byte is missing or duplicated.
// After a power failure this also holds for data that reached the disk, if the serial log survived. An unfinished line
// stays in the serial log until it is complete.
//
// If the container's log cannot be written, for example because the disk is full, the relay retries. Meanwhile the
// serial log grows until its file system is full. The container's log then says that output was lost.
//
// The package must not know about containers. It opens their logs only with Config.OpenLog.
package console
