// Package process names, watches and signals processes by pidfd, children of ours or not, so that a PID which the kernel
// has given to another process is never mistaken for the old one.
//
//	Open(pid) ──► Process ── Dead (a channel, no thread, no polling) · Signal · Wait
//	                │ ID{Pid, Start}: what a state file keeps
//	Adopt(ID) ◄─────┘         in the next life of the daemon: the same process, or errdefs.ErrNotFound
//
// Beside that it has what every starter of confined processes needs: a thread to start them from, and the end of their logs.
//
// It must not know what the processes are for.
package process
