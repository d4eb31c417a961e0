// Package runtime is the contract between the edge manager and what runs modules.
//
//	manager ── Create, Send … ──▶ Runtime ──▶ an external program (runtime/minimal)
//	        ◀── Receive ─────────         ──▶ unit pods of the node (runtime/unitpods)
//
// It must not import the manager, an implementation, or anything of MQTT. Start reading at Runtime.
package runtime
