// Command tripod is the node runtime: the daemon, the checks of its host, and the client commands.
//
// This package is plain wiring code, the only place that knows every part and chooses among backends. It owns what
// concerns the process as a whole (state directories and their lock, the socket, signals, systemd, the log). It must
// not contain rules about pods or images; those belong to the parts.
//
//	main ── newRoot ─┬─ daemon ── wiring.go: store, images, network, backends ─▶ node ─▶ cri ─▶ gRPC, edge ─▶ MQTT
//	                 ├─ sessions ── exec, attach and port-forward; the daemon starts it, and it outlives the daemon
//	                 ├─ orchestrator ── internal/edge
//	                 ├─ check, config, diag, version, man
//	                 ├─ vm, keyvalue ── what the node keeps for machines and components
//	                 ├─ bench ── internal/cli/bench
//	                 ├─ ps, pods, run, exec and all others over the CRI socket ── internal/cli (App.Commands)
//	                 ├─ component, wit, push, call ── internal/cli, without a node
//	                 ├─ edge ── internal/cli, over MQTT
//	                 └─ apply, get and others that users of other tools type (elsewhere.go)
package main
