// Package orchestrator gives modules to runtimes and keeps the record of both (Seed 4; the edge protocol's sections
// Registration, Orchestrator and Faults).
//
//	clients ──create, delete──▶ ┌──────────────┐ ──create, delete──▶ managers
//	        ◀──────errors────── │ Orchestrator │ ◀─register, exited,─
//	REST    ──────GET────────▶  │    record    │   keepalive, last will
//	                            └──────────────┘
//
// Everything that happens — a message, a deadline, a restart that is due — is one transition:
//
//	read the record ─▶ decide ─▶ one bbolt transaction on the disk ─▶ the record in memory ─▶ publish
//
// A transition that fails at any step before the disk has changed nothing. What was to be published and may not have been,
// because the process died, is marked in the record (Record.Untold) and published again at the next start.
//
// A module's states, and what leads from one to the other (table.go has them as data):
//
//	          place                delete            exit
//	Q queued ───────▶ A alive ────────────▶ E exiting ──▶ D dead
//	   ▲                │  ▲                   └─ lose ──▶ │
//	   │ wait      lose │  │ place, revive                 │
//	   └─────────────── K killed ── delete, exit ─────────▶┘
//
// No message stops the orchestrator: what is bad is logged, counted and answered on the error topic, and the next message is
// read. Its own messages, answers to others and retained messages are not acted upon.
//
// The package must not speak to runtimes or run modules, and knows neither the node nor a backend.
package orchestrator
