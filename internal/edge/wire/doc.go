// Package wire is what the edge protocol looks like in bytes: frames between a manager and a runtime (SLSocket), the payloads
// in them, the JSON envelopes on MQTT, and the names of the topics (Seed 4; docs/edge.md has the reference).
//
//	orchestrator ◀──Envelope on Topics──▶ manager ◀──Message on a Conn──▶ runtime ── modules
//
//	narrow frame   len:u32 LE │ control:1 module:7  │ arg:u8     │ payload     every peer; 128 modules, 256 channels
//	wide frame     len:u32 LE │ control:1 module:15 │ arg:u16    │ payload     only where both sides are Tripod's (Conn.Widen)
//	                           (u16 LE)               (u16 LE)
//
// len counts the payload only. arg is the type of a control message, and the number of the channel else.
//
// What comes from a peer is never trusted: nothing here panics on it, allocates by what a header promises, or loses a field
// that it does not know. Errors of bad input are errdefs.ErrInvalidArgument.
//
// The package must not do I/O other than on the connection that it is given, and imports nothing of Tripod: the worker, the
// node and test programs use it too.
package wire
