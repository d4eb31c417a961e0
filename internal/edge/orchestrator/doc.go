// Package orchestrator assigns modules to runtimes and keeps the record of both. docs/edge.md is the guide.
//
//	clients ──create, delete──▶ ┌──────────────┐ ──create, delete──▶ managers
//	        ◀──────errors────── │ Orchestrator │ ◀─register, exited,─
//	REST    ──────GET────────▶  │    record    │   keepalive, last will
//	                            └──────────────┘
//
// Every event (a message, a deadline, a restart that is due) is one transition:
//
//	read the record ─▶ decide ─▶ one bbolt transaction on the disk ─▶ the record in memory ─▶ publish
//
// A transition that fails before the write to disk has changed nothing. Messages that may not have reached the broker when the
// process died are marked in the record (Record.Untold) and published again at the next start.
//
// The states of a module and its events (table.go has them as data):
//
//	          place                delete            exit
//	Q queued ───────▶ A alive ────────────▶ E exiting ──▶ D dead
//	   ▲                │  ▲                   └─ lose ──▶ │
//	   │ wait      lose │  │ place, revive                 │
//	   └─────────────── K killed ── delete, exit ─────────▶┘
//
// No message stops the orchestrator: a bad one is logged, counted and answered on the error topic. It ignores its own messages,
// responses and retained messages.
//
// The package must not speak to runtimes or run modules, and knows neither the node nor a backend. Start reading at receive.go.
package orchestrator
