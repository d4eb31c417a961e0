// Package network gives a pod its network, whatever stands behind the pod: a network namespace, pinned by a bind
// mount, and in it what the node's CNI chain makes.
//
//	Setup(pod)                                                    Teardown(pod)
//	  │                                                             │
//	  ├─► record on disk (conf list, arguments) ┐ at the            ├─► DEL of the recorded chain, also when the
//	  ├─► netns: unshare, lo up, bind mount     ┘ same time         │   namespace is gone or the configuration changed
//	  │        · network.setup.netns                                │        · network.teardown.del
//	  ├─► ADD of the chain, plugin after plugin                     ├─► netns unmounted, file removed
//	  │        · network.setup.add                                  └─► record removed, the last thing of all
//	  └─► Result: addresses, interfaces, routes
//
//	on disk   CacheDir/attachments/KEY.json   the record: written and fsync'd before ADD, removed after DEL
//	          CacheDir/results/…              libcni's cache of ADD results
//	          CacheDir/leases/…               host-local's leases, embedded default chain only
//	          CacheDir/pod-cidr.json          what the kubelet told by UpdateRuntimeConfig
//	mounts    NetnsDir/KEY                    the namespace (nsfs)
//
// KEY is the pod ID where CNI allows it as a container ID, else a hash of it (keyOf). As everything is found from
// the pod ID, nothing must be remembered for a roll-back: whatever was begun and not finished, in this process or
// in one that was killed, is undone by Teardown, or by GC for pods that nobody claims any more. A roll-back whose
// DEL fails is repeated in the background until it succeeds; a Teardown whose DEL fails is the caller's to repeat.
//
// The chain is the first configuration of ConfDir by file name; without one it is the embedded default: bridge,
// host-local, and portmap and bandwidth for the pods that ask for them. Plugins are the standard's executables,
// run by libcni; ours is the process handling around them (pluginExec): process groups, deadlines, bounded output. What
// the reference's bridge, host-local and loopback do is done in this process instead (package builtin), unless the
// configuration asks them for more than we know: the same network at a tenth of the time.
//
// The package also opens sockets inside a pod's namespace (Dial, Listen) and reads interface counters there (Stats).
//
// It knows nothing of pods beyond Attachment, keeps no pod state, and touches nothing outside its directories, the
// namespaces it made and what the plugins do.
package network
