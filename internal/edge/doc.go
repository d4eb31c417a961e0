// Package edge opens the MQTT front door of a node, and the orchestrator, as the configuration says. docs/edge.md is
// the guide.
//
//	cmd/tripod ── Open ─────────────▶ manager ─▶ runtime/unitpods, runtime/minimal
//	           │                         │
//	           │                       mqtt ─▶ broker (embedded or external)
//	           │                         │
//	           └─ OpenOrchestrator ──▶ orchestrator
//
// It owns the identity of the node's manager and runtimes (identity.go), and the checks of `tripod check` (check.go).
// While a disk fault keeps the front door closed, it keeps trying to open the door. The parts below it handle the
// messages; none of them imports this package. Start reading at Open.
//
// # Subpackages
//
//	manager        the MQTT front door of a node
//	orchestrator   assigns modules to runtimes
//	runtime        the contract between the manager and the runtimes, which are below it
//	mqtt           the MQTT client of manager and orchestrator
//	broker         the embedded MQTT broker
//	packet         MQTT's control packets, for client and broker
//	wire           the messages of the edge protocol, and the names of its topics
//	twin           keeps two processes with one identity apart
package edge
