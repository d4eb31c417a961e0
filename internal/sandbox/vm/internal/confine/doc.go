// Package confine starts the processes that serve a machine (QEMU, virtiofsd) so that they outlive the daemon and gain
// nothing by it: each in a session of its own, in the machine's cgroup from its first instruction, with no_new_privs and
// without core files. It also bounds and reads the files in which they write what they have to say.
//
// Users, namespaces and descriptors are the caller's, who sets them in the command. The package must not know what the
// processes are for.
package confine
