// Package network gives a pod its network, whatever the backend: a network namespace, pinned by a bind mount, with what the
// node's CNI chain makes in it.
//
//	Setup(pod)                                                    Teardown(pod)
//	  │                                                             │
//	  ├─► record on disk (conf list, arguments) ┐ at the            ├─► DEL of the recorded chain, also when the
//	  ├─► netns: unshare, lo up, bind mount     ┘ same time         │   namespace is gone or the configuration changed
//	  │        · network.setup.netns                                │        · network.teardown.del
//	  ├─► ADD of the chain, plugin after plugin                     ├─► netns unmounted, file removed
//	  │        · network.setup.add                                  └─► record removed, last of all
//	  └─► Result: addresses, interfaces, routes
//
//	on disk   CacheDir/attachments/KEY.json   the record: written and fsync'd before ADD, removed after DEL
//	          CacheDir/results/…              libcni's cache of ADD results
//	          CacheDir/leases/…               host-local's leases, embedded default chain only
//	          CacheDir/pod-cidr.json          what the kubelet set by UpdateRuntimeConfig
//	mounts    NetnsDir/KEY                    the namespace (nsfs)
//
// KEY is the pod ID if CNI allows it as a container ID, and otherwise a hash of it (keyOf). Everything is found from the pod ID,
// so a roll-back needs no memory: Teardown undoes whatever was begun, in this process or in one that was killed, and GC does so
// for pods that nobody claims any more. A roll-back whose DEL fails is retried in the background until it succeeds; after a
// Teardown whose DEL fails, the caller retries.
//
// The chain is the first configuration of ConfDir by file name; without one it is the embedded default: bridge,
// host-local, and portmap and bandwidth for the pods that ask for them. Plugins are the standard's executables,
// run by libcni. We handle the processes (pluginExec): process groups, deadlines, bounded output. Package builtin does in this
// process what the reference's bridge, host-local and loopback do, in a tenth of the time, unless the configuration asks for
// more than it knows.
//
// The package also opens sockets inside a pod's namespace (Dial, Listen) and reads interface counters there (Stats).
//
// It knows nothing of pods beyond Attachment, keeps no pod state, and touches nothing outside its directories, the
// namespaces it made and what the plugins do.
package network
