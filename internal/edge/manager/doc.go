// Package manager is the edge front door of a node. It registers the node's runtimes with an orchestrator over MQTT, creates and
// deletes modules on its orders, and carries the messages of their channels. docs/edge.md is the guide.
//
//	                ┌──────────────── Manager ────────────────┐
//	orchestrator ◀─▶│ control ─▶ host ─▶ module ─┐  record     │   one host per runtime, one module per index
//	   clients      │   reg      ▲  │            ├▶ (bbolt)    │
//	    broker ◀───▶│ channels ──┼──▼── outbox ──┘             │
//	                └────────────┼──────────────┬──────────────┘
//	                     Receive │              │ Create, Send
//	                             └── Runtime ◀──┘                 runtime/minimal, runtime/unitpods
//
// The states of a module are a table (states.go), printed in docs/edge-states.md. A module is recorded before it is created, and an
// exit before it is reported, so the daemon may be killed at any line: the next one adopts or creates again what is to run, and
// reports the exits that the broker has not acknowledged. It needs neither orchestrator nor broker for that.
//
// No message ends the manager. What it cannot do it answers on the error topic where the protocol has an answer, logs and counts.
// Every queue for a slow peer is bounded and counts what it drops.
//
// The package must not know a backend, the node, or a kind of runtime. Start reading at Open, host.supervise and states.go.
package manager
