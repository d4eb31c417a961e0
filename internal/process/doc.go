// Package process identifies, watches and signals processes by pidfd, our children or not. A process that has reused a PID is
// never mistaken for the previous one.
//
//	Open(pid) ──► Process ── Dead (a channel, no thread, no polling) · Signal · Wait
//	                │ ID{Pid, Start}: goes into a state file
//	Adopt(ID) ◄─────┘         after a restart of the daemon: the same process, or errdefs.ErrNotFound
//
// It also has what callers need that start confined processes: a thread to start them from, and the tail of their logs. It must
// not know what the processes are for.
package process
