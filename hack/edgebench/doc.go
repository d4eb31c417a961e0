// Edgebench measures the edge front door as its clients see it, for hack/bench.sh: what a message between two modules takes, how
// many of them go through the broker beside plain clients of the same broker, how long it takes until a module runs, and how many
// can run. The tables go to standard output.
//
//	edgebench ──MQTT──▶ broker ──▶ manager ──▶ tripod/wasm ──▶ ping, relay (examples/edge)
//	          ◀──────── reports, logs, messages ◀──────────────┘
package main
