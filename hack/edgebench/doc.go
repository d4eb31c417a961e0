// Edgebench measures the edge front door from its clients' view, for hack/bench.sh: the latency of messages between two
// modules, their rate through the broker compared with plain clients, the time until a module runs, and the time until
// many modules run. It prints the tables on standard output.
//
//	edgebench ──MQTT──▶ broker ──▶ manager ──▶ tripod/wasm ──▶ ping, relay (examples/edge)
//	          ◀──────── reports, logs, messages ◀──────────────┘
package main
