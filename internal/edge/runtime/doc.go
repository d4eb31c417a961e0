// Package runtime is the contract between the edge manager and the runtimes that run modules.
//
//	manager ── Create, Send … ──▶ Runtime ──▶ an external program (runtime/minimal)
//	        ◀── Receive ─────────         ──▶ unit pods of the node (runtime/unitpods)
//
// The package must not import the manager, an implementation, or MQTT packages. Start reading at Runtime.
//
// # Subpackages
//
//	minimal    the runtime linux/minimal, an external program
//	unitpods   the runtime tripod/wasm: each module is a unit pod of the node
package runtime
