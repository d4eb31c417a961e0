// Package network sets up pod networks for every backend: a network namespace, pinned by a bind mount, and the
// interfaces that the node's CNI chain creates in it.
//
//	Setup(pod)                                                    Teardown(pod)
//	  │                                                             │
//	  ├─► record on disk (conf list, arguments) ┐ in                ├─► DEL of the recorded chain, even if the
//	  ├─► netns: unshare, lo up, bind mount     ┘ parallel          │   namespace is gone or the configuration changed
//	  │        · network.setup.netns                                │        · network.teardown.del
//	  ├─► ADD of the chain, plugin after plugin                     ├─► netns unmounted, file removed
//	  │        · network.setup.add                                  └─► record removed last
//	  └─► Result: addresses, interfaces, routes
//
//	on disk   CacheDir/attachments/KEY.json   the record: synced before ADD, removed after DEL
//	          CacheDir/results/…              libcni's cache of ADD results
//	          CacheDir/leases/…               host-local's leases, embedded default chain only
//	          CacheDir/pod-cidr.json          the pod CIDR from the kubelet (UpdateRuntimeConfig)
//	mounts    NetnsDir/KEY                    the namespace (nsfs)
//
// In the diagram, · marks a fail point. KEY is the pod ID if CNI allows that ID as a container ID, otherwise a hash of
// the ID (keyOf). All state on disk can be found from the pod ID, so a roll-back needs no state in memory: Teardown
// undoes a Setup even if the process that ran it was killed, and GC does the same for pods that no longer exist. If DEL
// fails during a roll-back, the Manager retries in the background until it succeeds. A Teardown whose chain runs in this
// process is background work as a whole; if another chain's DEL fails during a Teardown, the caller retries.
//
// The chain is the configuration in ConfDir whose file name sorts first. If ConfDir has none, the chain is the embedded
// default: bridge and host-local, plus portmap and bandwidth for pods that ask for them. Plugins are standard CNI
// executables, run by libcni; pluginExec manages their processes (process groups, deadlines, bounded output). If
// package builtin supports the configuration, it does the work of the reference plugins bridge, host-local, loopback
// and portmap in this process, in a tenth of the time.
//
// The package also opens sockets inside a pod's namespace (Dial, Listen) and reads interface counters (Stats).
//
// It knows nothing about pods beyond Attachment and keeps no pod state. Outside its directories and namespaces, it
// changes only the addresses of the default bridge and the rules of its subnets (firewall.go); CNI plugins may change more.
//
// # Subpackages
//
//	builtin     does the work of the reference CNI plugins in this process
//	iptables    runs the iptables programs; one execution applies several rules
//	netthread   runs functions inside a network namespace
package network
