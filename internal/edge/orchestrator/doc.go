// Package orchestrator assigns modules to runtimes and keeps the record of both. docs/edge.md is the guide.
//
//	clients ──create, delete──▶ ┌──────────────┐ ──create, delete──▶ managers
//	        ◀──────errors────── │ Orchestrator │ ◀─register, exited,─
//	REST    ──────GET────────▶  │    record    │   keepalive, last will
//	                            └──────────────┘
//
// Each event (a message, a deadline, a due restart) is one transition:
//
//	read the record ─▶ decide ─▶ one bbolt transaction on the disk ─▶ the record in memory ─▶ publish
//
// A transition that fails before the write to disk changes nothing. The record marks orders that the broker has not
// acknowledged (Record.Unconfirmed), and the next start publishes them again.
//
// The states of a module and the events that change them (table.go):
//
//	          place                delete            exit
//	Q queued ───────▶ A alive ────────────▶ E exiting ──▶ D dead
//	   ▲                │  ▲                   └─ lose ──▶ │
//	   │ wait      lose │  │ place, revive                 │
//	   └─────────────── K killed ── delete, exit ─────────▶┘
//
// No message stops the orchestrator. It logs and counts bad messages, and answers them on the error topic. It ignores
// responses, retained messages, and messages that it has sent itself.
//
// The package must not talk to runtimes, run modules, or know about the node or its backends. Start reading at
// receive.go.
package orchestrator
