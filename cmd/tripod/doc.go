// Command tripod is the node runtime: the daemon, the checks of its host, and the commands of its users.
//
// This package is the wiring, in plain code: it is the only place that knows every part and that chooses among
// backends. It owns what concerns the process as a whole (state directories, the lock on them, the socket, signals,
// systemd, the log). It must not hold a rule about pods or images; those live in the parts.
//
//	main ── root command ─┬─ daemon ── wiring.go: store, images, network, backends ─▶ node ─▶ cri ─▶ gRPC
//	                      ├─ check, config, diag, version
//	                      ├─ bench ── internal/cli/bench
//	                      └─ ps, pods, run, exec … ── internal/cli
package main
