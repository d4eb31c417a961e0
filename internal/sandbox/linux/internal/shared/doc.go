// Package shared makes what the containers of a pod share: namespaces, the files for /etc, and /dev/shm.
//
//	<run dir>/ns/{ipc,uts,pid,user}   Pins: a namespace is mounted on each, and lives without a process
//	<run dir>/etc/, <run dir>/shm     Files: two tmpfs of the pod
//
// A pod's paths derive from its configuration and its run-time directory. Begin with PinsOf and MakeNamespaces, and with
// FilesOf. Everything can be made again after an interrupted attempt.
//
// The package must not run a process or set up a network: it is given the network namespace.
package shared
