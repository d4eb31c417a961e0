// Package manager is the edge front door of a node: it registers the node's runtimes with an orchestrator over MQTT, creates
// and deletes modules as it is told, and carries what they say (Seed 4; docs/edge.md).
//
//	                ┌──────────────── Manager ────────────────┐
//	orchestrator ◀─▶│ control ─▶ host ─▶ module ─┐  record     │   one host per runtime, one module per index
//	   clients      │   reg      ▲  │            ├▶ (bbolt)    │
//	    broker ◀───▶│ channels ──┼──▼── outbox ──┘             │
//	                └────────────┼──────────────┬──────────────┘
//	                     Receive │              │ Create, Send
//	                             └── Runtime ◀──┘                 runtime/minimal, runtime/unitpods
//
// A module is in the record before it is created, and an exit before it is told, so that the daemon may be killed at any line:
// the next one goes on with what runs (runtime.Adopter), creates again what does not, and tells the exits that nobody has
// acknowledged. Neither orchestrator nor broker is needed for that.
//
//	            create                 CreateModule              Exited
//	(nothing) ─────────▶ pending ─▶ creating ─▶ running ───────────────────▶ exited ─▶ (nothing)
//	                        ▲                      │  delete ▶ deleting ────▶   │ until the broker has the message
//	                        └──── runtime lost ────┘
//
// No message ends the manager: what it cannot do is answered on the error topic where the protocol has an answer, logged,
// counted, and disturbs nothing else. What waits for somebody slow waits in a bounded queue with a counter for what is dropped.
//
// The package must not know a backend, the node, or a kind of runtime; it sees internal/edge/runtime only.
package manager
