// Package wasi is what a component finds of WASI 0.2: streams and pollables (wasi:io), and whatever makes them (standard
// streams, the monotonic clock, files). The engine has a WASI of its own, but a request's body is a stream of ours, a guest
// knows one type of stream only, and the engine's cannot be made from outside; nor are the files counted that are open in
// it, or a guest be woken that waits there. So all interfaces that speak of streams are here; the others (random,
// environment, exit …) stay the engine's.
//
//	wit/*.wit ──ParseWIT──► signatures ┐
//	                                   ├─► Bound: name, types, Go function ──► engine.Host (internal/component/wasihttp)
//	io.go, files.go … functions ───────┘
//
//	State: what the host has of one instance — the table of its resources, who wakes it when it waits
//
// A guest runs on one thread, so that everything in a State is done one after the other; only what works in the background
// for a stream (reading ahead, writing behind) runs beside it, has a lock of its own, and tells the State by Wake.
//
// There are no sockets: what would make one answers access-denied. Files are those below the preopened directories, through
// os.Root, which follows no link out of them.
//
// The package is pure Go and does not know the engine, so that its tests need no guest.
package wasi
