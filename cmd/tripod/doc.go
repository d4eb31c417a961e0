// Command tripod is the node runtime: the daemon, the checks of its host, and the client commands.
//
// This package is plain wiring code, the only place that knows every part and chooses among backends. It owns what
// concerns the process as a whole (state directories and their lock, the socket, signals, systemd, the log). It must
// not contain rules about pods or images; those belong to the parts.
//
//	main ── root command ─┬─ daemon ── wiring.go: store, images, network, backends ─▶ node ─▶ cri ─▶ gRPC, edge ─▶ MQTT
//	                      ├─ orchestrator ── edge
//	                      ├─ check, config, diag, version
//	                      ├─ bench ── internal/cli/bench
//	                      └─ ps, pods, run, exec … ── internal/cli
package main
