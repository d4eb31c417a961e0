// Package runtime is the contract between the edge manager and whatever runs modules: the RuntimeManager of seed 4.
//
//	           wire.Message                       the runtime's own way
//	manager ── Send ──────▶ Runtime ──────────────▶ external program (runtime/minimal)
//	        ◀── Receive ──          ◀────────────── unit pods of the node (runtime/unitpods)
//
// Runtime is the least that there is to implement. What a runtime can do beyond it, it tells by the optional interfaces
// Creator, Deleter, Cleaner, Grouper and Adopter: the seed's overridable methods, and what a node needs that is restarted.
//
// The package holds no code that runs: it must not import the manager, an implementation, or anything of MQTT.
package runtime
