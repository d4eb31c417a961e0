// Package edge is the door to the MQTT front door: it opens the front door of a node, and the orchestrator, from their
// configuration. docs/edge.md is the guide.
//
//	cmd/tripod ── Open ─────────────▶ manager ─▶ runtime/unitpods, runtime/minimal
//	           │                         │
//	           │                       mqtt ─▶ broker (embedded, or another's)
//	           │                         │
//	           └─ OpenOrchestrator ──▶ orchestrator
//
// It owns the identity of the node's manager and runtimes (identity.go), the checks of `tripod check` (check.go) and
// the retries while a disk fault keeps the front door closed. What a message does is for the parts to decide; none of
// them imports this package. Start reading at Open.
package edge
