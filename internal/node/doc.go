// Package node is the pod pool, the only owner of state. Control planes send orders. The node checks each order against
// the state table, records the intent, calls the backend and the network, and records the result.
//
//	internal/cri   internal/edge
//	       │  orders     │            reads (Pods, Pod, Container) wait for no order
//	       ▼             ▼
//	┌──────────────────────────────────────────────┐
//	│ slot        one order at a time per pod and  │   work goes on if its caller goes away;
//	│             per container                    │   the caller's retry finds the result
//	│ table       what the call does in this state │
//	│ transition  intent ─▶ effect ─▶ commit       │──▶ store (bbolt): one record per pod
//	│ publish     snapshot, index, events          │──▶ subscribers
//	└──────┬──────────────────────┬────────────────┘
//	       ▼                      ▼
//	sandbox.Backend        internal/network
//
// A record is one pod with its containers. Its intents (Pod.Intent, Container.Intent, the state Starting, the empty
// state) mark orders that have not completed. After a daemon was killed at any point, its next start (Open) finds the
// intents and finishes or undoes the work. They also let the janitor retry a failed clean-up.
//
// Snapshots are immutable. While a backend works, only the pod's slot is held, so List and Status calls never wait for
// a backend.
//
// In comments, "seed 1" is the document that defines the state table; docs/sources.md lists that document.
//
// The package must not know about any concrete backend or control plane; cmd/tripod connects them to the node. Read
// node.go first, then sandbox_run.go.
//
// # Subpackages
//
//	store   keeps the records on disk, in one bbolt file
package node
