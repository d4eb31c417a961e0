// Package testns runs a command in new namespaces, so that a test can create bridges, NAT rules, mounts, cgroups and
// daemons as root without leaving anything behind.
//
// It owns the creation and removal of these namespaces, called a world. It must not know what runs inside.
//
//	supervisor (host)                     init (PID 1 of the new namespaces)            command
//	────────────────────────────────────────────────────────────────────────────────────────────────────
//	make a directory, lock it
//	clone(NEWNS NEWNET NEWPID NEWIPC NEWUTS) ──▶ / private, own /proc, /run and /dev/null,
//	                                      the directory at TRIPOD_TEST_DIR,
//	                                      no cgroup2 beside v1, / shared again,
//	                                      lo up, forwarding on
//	                                      start the command ──────────────────▶ runs
//	forward INT TERM HUP QUIT ──────────▶ forward ────────────────────────────▶
//	                                      reap orphans until it ends ◀────────── exit code
//	                                      name the processes still running
//	wait ◀─────────────────────────────── exit with the command's code
//	                                      (the kernel kills the rest)
//	remove TRIPOD_TEST_CGROUP in every hierarchy and the directory
//
// The kernel removes processes with the PID namespace, mounts with the mount namespace, and links and rules with the
// network namespace, even if the supervisor is killed. The supervisor removes directories and cgroups. If the
// supervisor is killed, the next run removes them. That run recognizes them by a lock that no process holds.
package testns
