// Package wasi implements the part of WASI 0.2 that has streams: streams and pollables (wasi:io), and the interfaces that make
// them (standard streams, the monotonic clock, files). Wasmtime has a WASI too, but its streams cannot be made from Go, and the
// body of an HTTP request must be a stream of the same type as all others. Nor does it count open files, or wake a guest that
// waits in it. The interfaces without streams (random, environment, exit …) stay wasmtime's.
//
//	wit/*.wit ──ParseWIT──► signatures ┐
//	                                   ├─► Bound: name, types, Go function ──► engine.Host (internal/component/wasihttp)
//	io.go, files.go … functions ───────┘
//
//	State: what the host has of one instance — the table of its resources, who wakes it when it waits
//
// A guest runs on one thread, so a State needs no lock. Only the background work of a stream (reading ahead, writing behind) is
// concurrent; it has its own lock and calls State.Wake.
//
// There are no sockets: functions that would make one return access-denied. Files are those below the preopened directories,
// opened through os.Root, which follows no link out of them.
//
// The package is pure Go and does not know the engine, so that its tests need no guest.
package wasi
