// Package manager is the MQTT front door of a node. It registers the node's runtimes with an orchestrator, creates and
// deletes modules on the orchestrator's orders, and carries the messages of the modules' channels. docs/edge.md is the
// guide.
//
//	                ┌──────────────── Manager ────────────────┐
//	orchestrator ◀─▶│ control ─▶ host ─▶ module ─┐  record     │   one host per runtime, one module per index
//	   clients      │   reg      ▲  │            ├▶ (bbolt)    │
//	    broker ◀───▶│ channels ──┼──▼── outbox ──┘             │
//	                └────────────┼──────────────┬──────────────┘
//	                     Receive │              │ Create, Send
//	                             └── Runtime ◀──┘                 runtime/minimal, runtime/unitpods
//
// The states of a module are a table (states.go), printed in docs/edge-states.md. A module is recorded before it is
// created, and an exit is recorded before it is reported. The daemon can therefore be killed at any point. The next
// daemon adopts the modules or creates them again, even while the orchestrator or the broker is unavailable. It also
// reports the exits that the broker has not acknowledged.
//
// No message stops the manager. It logs and counts orders that it cannot obey, and answers them on the error topic.
// Every queue for a slow peer is bounded and counts the messages that it drops.
//
// The package must not know about backends, the node, or kinds of runtimes. Start reading at Open, host.supervise and
// states.go.
package manager
