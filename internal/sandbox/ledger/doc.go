// Package ledger keeps the containers of one kind of pod: a handle for each, with its state in memory and on the disk and its
// present run. Every backend has one Ledger, of a state and a run of its own. Begin reading with Ledger.
//
// The state file is written before the step that it announces. A daemon that dies in between finds the step there, and asks
// whatever runs the container how far it came:
//
//	          Begin              End
//	Created ────────▶ Started ────────▶ Exited
//	   ▲  ▲              │                │
//	   │  └──── End ─────┘                │   the start was undone
//	   └─ ─ ─ ─ ─ ─ Begin ─ ─ ─ ─ ─ ─ ─ ─ ┘   it starts again
//
// A call looks its container up by what it needs, so that every kind refuses the same call in the same state with the same error
// class:
//
//	Find       status, figures, removal   absent: a nil handle
//	FindRun    stop                       absent, or not running: a nil run
//	Startable  start                      absent: ErrFailedPrecondition; running: a nil handle
//	Get        update                     absent: ErrFailedPrecondition
//	GetRun     exec, attach, logs         absent, or not running: ErrFailedPrecondition
//
// The ledger must not run anything, nor decide how a container ended: the kind says so to End, and the first to say it counts.
package ledger
