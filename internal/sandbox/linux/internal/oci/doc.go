// Package oci runs containers with an OCI runtime (crun or runc) and conmon, which monitors each of them.
//
//	FindRuntime ──▶ Runtime                     OpenMonitor ──▶ Monitor, with a Spawner
//	                                                              │ Start                    │ Exec
//	                 create            forks                      ▼                          ▼
//	      init ◀─────────────── crun ◀─────── conmon ◀── cgroup of the conmons ──▶ conmon ──▶ crun ──▶ program
//	       ▲                                   │ holds stdio, writes the log        │ exits with the program's code
//	       │ Runtime.Start: a byte             │ and the exit file (ReadExit)
//	       │ to init, or crun start            ├── ctl      ◀── Resize, ReopenLog
//	                                           └── attach   ◀══ Hub ◀── clients (Attach, Add)
//
// Begin with Runtime and Monitor. Both processes of a container outlive the daemon: a later one finds them by Monitors and
// InitPid, and how the container ended by ReadExit. What serves an exec does not outlive its process: ReapExecs ends what a
// killed process has left.
//
// The runtime is tried with containers of its own before it is used, unless the results are known (Tried). Findings say
// what the administrator should know about the programs.
//
// The package must not know pods, how a bundle is made, or what the state of a container is. It is given directories,
// specifications and cgroups, and returns processes.
package oci
