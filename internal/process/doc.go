// Package process identifies, watches and signals processes by pidfd, whether they are our children or not. If a
// process has reused a PID, it is never mistaken for the previous process.
//
//	Open(pid) ──► Process ── Dead (a channel, no thread, no polling) · Signal · Wait
//	                │ ID{Pid, Start}: goes into a state file
//	Adopt(ID) ◄─────┘         after a restart of the daemon: the same process, or errdefs.ErrNotFound
//
// For callers that start confined processes, it also has a thread to start them from, and reads the tail of their logs.
// It must not know the purpose of the processes.
package process
