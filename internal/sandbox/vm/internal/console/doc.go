// Package console is the serial console of a machine as a container's output: its log, and attach.
//
//	QEMU ──▶ serial log (a file, appended to whoever listens)
//	  ▲          │ tail, woken by inotify
//	  │          ├─▶ relay ──▶ the container's log, in the CRI's format
//	  │          │     └─ state file: how far both are; what is behind is punched out of the serial log
//	  │          └─▶ hub ──▶ attached clients
//	  └─ serial input ◀─┘ ◀── their input
//
// # Exactly once
//
// The relay appends entries for a piece of the serial log to the container's log, and then writes into the state file how
// far both files are. A daemon that dies between the two leaves entries behind that nobody has vouched for: the next one cuts
// them off and makes them again from the serial log. So after SIGKILL at any point no byte is missing and none is there
// twice. (After a power loss the files are what the disk kept; then too only what was vouched for counts, unless its source is
// gone.) A line that is not finished is not written, and so not held anywhere but in the serial log.
//
// A container's log that cannot be written (a full disk) is tried again; the serial log grows meanwhile, as long as its file system
// has room. Where that was full, what came then is missing, and the container's log says so.
//
// The package knows no container, and it opens no log itself: Config.OpenLog does.
package console
