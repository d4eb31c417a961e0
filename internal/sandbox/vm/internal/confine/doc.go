// Package confine starts the processes that serve a machine (QEMU, virtiofsd). They outlive the daemon and are
// confined: each has its own session, runs in the machine's cgroup from its first instruction, has no_new_privs set,
// and writes no core files. The package also limits and reads their log files. Begin with Start.
//
// The caller sets users, namespaces and descriptors in the command. The package must not know what the processes do.
package confine
