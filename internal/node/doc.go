// Package node is the pod pool: the only owner of state. Both control planes order, the node decides by the state
// table, records what it intends, has a backend and the network do it, and records what came of it.
//
//	internal/cri   internal/edge
//	       │  orders     │            reads (Pods, Pod, Container) take no lock
//	       ▼             ▼
//	┌──────────────────────────────────────────────┐
//	│ slot        one order at a time per pod and  │   a caller that goes away leaves its work
//	│             per container                    │   to finish; its retry finds the outcome
//	│ table       what the call does in this state │
//	│ transition  intent ─▶ effect ─▶ commit       │──▶ store (bbolt): one record per pod
//	│ publish     snapshot, index, events          │──▶ subscribers
//	└──────┬──────────────────────┬────────────────┘
//	       ▼                      ▼
//	sandbox.Backend        internal/network
//
// A record is one pod with its containers. Its intents (Pod.Intent, Container.Intent, the state Starting, the empty
// state) say what was ordered and not yet seen to its end, so that a daemon that was killed at any line can finish or
// undo it when it comes back (Open), and a failed clean-up can be retried while it lives (the janitor).
//
// Snapshots are immutable. Nothing is held while a backend works but that pod's slot: lists and status calls answer
// whatever any backend is doing.
//
// "Seed 1" in comments is the document that the state table comes from: docs/sources.md.
//
// The package knows no concrete backend and no control plane; cmd/tripod wires them together.
package node
