// Package testns runs a command in a world of its own, so that a test may make bridges, NAT rules, mounts, cgroups
// and daemons as root and still leave nothing behind.
//
// It owns that world's making and unmaking. It must not know what runs inside.
//
//	supervisor (host)                     init (PID 1 of the new namespaces)            command
//	────────────────────────────────────────────────────────────────────────────────────────────────────
//	make TRIPOD_TEST_DIR, lock it
//	clone(NEWNS NEWNET NEWPID NEWIPC NEWUTS) ──▶ / private, own /proc and /run,
//	                                      no cgroup2 beside v1, / shared again,
//	                                      lo up, forwarding on
//	                                      start the command ──────────────────▶ runs
//	forward INT TERM HUP QUIT ──────────▶ forward ────────────────────────────▶
//	                                      reap orphans until it ends ◀────────── exit code
//	                                      name what it left running
//	wait ◀─────────────────────────────── exit with the command's code
//	                                      (the kernel kills what is left)
//	remove TRIPOD_TEST_CGROUP in every hierarchy and TRIPOD_TEST_DIR
//
// Processes are ended by the PID namespace, mounts by the mount namespace, links and rules by the network namespace:
// the kernel does it, even when the supervisor itself is killed. Only directories and cgroups need a hand; those of
// a supervisor that was killed are swept by the next run, which knows them by a lock that nobody holds.
package testns
