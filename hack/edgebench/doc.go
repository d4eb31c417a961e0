// Edgebench measures the edge front door as its clients see it. It measures the latency of messages between two
// modules, the rate of messages from a module and from a plain client, the time until one module runs, and the time
// until many modules run. It prints its results as tables on standard output. hack/bench.sh runs it.
//
//	edgebench ──MQTT──▶ broker ──▶ manager ──▶ tripod/wasm ──▶ ping, relay (examples/edge)
//	          ◀──────── reports, logs, messages ◀──────────────┘
package main
