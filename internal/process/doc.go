// Package process identifies, watches and signals processes by pidfd, whether they are our children or not. A process
// that reuses a PID is never mistaken for the previous one.
//
//	Open(pid) ──► Process ── Dead (a channel, no thread, no polling) · Signal · Wait
//	                │ ID{Pid, Start}: goes into a state file
//	Adopt(ID) ◄─────┘         after a restart of the daemon: the same process, or errdefs.ErrNotFound
//
// For callers that start processes, the package also finds our programs, provides a thread to start them from, and
// reads the end of their logs. Resident is about this process. The package must not know the purpose of the processes.
package process
