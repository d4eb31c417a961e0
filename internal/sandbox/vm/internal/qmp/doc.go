// Package qmp speaks the QEMU Machine Protocol (docs/interop/qmp-spec of QEMU): JSON objects, one a line, over a stream.
//
//	          NewClient                     Execute                       Events
//	QEMU ──greeting──▶ qmp_capabilities ──▶ {"execute", "id"} ──▶ …
//	     ◀───────────────────────────────── {"return"|"error", "id"}
//	     ◀───────────────────────────────── {"event"} ─────────────────▶ a bounded channel
//
// One goroutine reads; it never waits for anybody: answers that nobody awaits any more are dropped, events that do not
// fit are counted. The length of a line is bounded. Whoever is at the other end may be hung or hostile (a guest that
// broke out of QEMU), so every wait has a deadline and every message is checked.
//
// It must not know what the commands mean, and never connects by itself: after Done, a new Client on a new connection is
// the caller's affair.
package qmp
