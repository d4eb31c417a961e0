// Package console is the serial console of a machine as a container's output: its log, and attach.
//
//	QEMU ──▶ serial log (a file, which QEMU always appends to)
//	  ▲          │ tail, woken by inotify
//	  │          ├─▶ relay ──▶ the container's log, in the CRI's format
//	  │          │     └─ state file: the offsets of both; what is copied is punched out of the serial log
//	  │          └─▶ hub ──▶ attached clients
//	  └─ serial input ◀─┘ ◀── their input
//
// # Exactly once
//
// The relay appends entries for a piece of the serial log to the container's log, and then commits the offsets of both files to
// the state file. A daemon that dies between the two leaves entries that are not committed: the next one truncates them and
// writes them again from the serial log. So after SIGKILL at any point no byte is missing and none is doubled. (After a power
// loss the same holds for what the disk kept, unless the source is gone.) An unfinished line stays in the serial log alone.
//
// A container's log that cannot be written (a full disk) is retried. The serial log grows until its file system is full; output
// that is lost then is noted in the container's log.
//
// The package must not know containers. It opens the log only by Config.OpenLog.
package console
