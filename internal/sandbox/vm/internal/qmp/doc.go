// Package qmp speaks the QEMU Machine Protocol (docs/interop/qmp-spec in QEMU's source): JSON objects, one per line,
// over a stream.
//
//	          NewClient                     Execute                       Events
//	QEMU ──greeting──▶ qmp_capabilities ──▶ {"execute", "id"} ──▶ …
//	     ◀───────────────────────────────── {"return"|"error", "id"}
//	     ◀───────────────────────────────── {"event"} ─────────────────▶ a bounded channel
//
// One goroutine reads and never blocks: it drops an answer that no caller waits for, and it drops and counts events for
// which the channel has no room. The length of a line is bounded. The peer can be hung or hostile (a guest that broke
// out of QEMU), so every wait has a deadline and every message is checked.
//
// The package does not know what commands mean and never connects by itself. After Done, the caller makes a new Client.
package qmp
