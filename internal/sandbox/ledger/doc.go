// Package ledger keeps track of the containers of one kind of pod. Each container has a handle, which holds the
// container's state (in memory and on disk) and the current run. Every backend has one Ledger, with the backend's own
// types for the state and the run. Begin with Ledger.
//
// The state file is written before the step that it announces. If the daemon dies in between, the next daemon finds the
// step in the file, and asks whatever runs the container how far the step got:
//
//	          Begin              End
//	Created ────────▶ Started ────────▶ Exited
//	   ▲  ▲              │                │
//	   │  └──── End ─────┘                │   the start was undone
//	   └─ ─ ─ ─ ─ ─ Begin ─ ─ ─ ─ ─ ─ ─ ─ ┘   it starts again
//
// Each order has its own lookup, so that every kind refuses the same order in the same state with the same error class:
//
//	Find       status, stats, removal     absent: a nil handle
//	FindRun    stop                       absent, or not running: a nil run
//	Startable  start                      absent: ErrFailedPrecondition; running: a nil handle
//	Get        update                     absent: ErrFailedPrecondition
//	GetRun     exec, attach, logs         absent, or not running: ErrFailedPrecondition
//
// The package must not run anything or decide how a container ended. The backend decides that with its first call to
// End for a run.
package ledger
