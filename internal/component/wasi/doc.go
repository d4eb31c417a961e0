// Package wasi implements WASI 0.2 without wasi:http. Wasmtime has a WASI too. However, it is only for components that
// wasmtime itself calls (the engine's component path). Go code cannot make streams for it, and the body of an HTTP
// request must be a stream of the same type as all other streams. Wasmtime's WASI also does not count open files, cannot
// wake a waiting guest, and starts background tasks for each instance.
//
//	wit/*.wit ──ParseWIT──► signatures ┐
//	                                   ├─► Bound: name, types, Go function ──► engine.Host (internal/component/wasihttp)
//	streams.go, files.go … functions ──┘
//
// Besides WASI 0.2, the package implements proposals, in the versions that toolchains know (Drafts): wasi:config,
// wasi:keyvalue, wasi:blobstore, wasi:logging and wasi:messaging.
//
//	State: the host's data for one instance, that is, the table of its resources and a channel that wakes the guest
//
// A guest runs on one thread, so a State needs no lock. Only the background work of a stream (reading ahead, writing
// behind) is concurrent. So each stream has a lock of its own, and its background work calls State.Wake.
//
// A Network opens the guest's sockets, connected: the package itself calls neither socket nor connect. Listening and
// binding to an address of the guest's choice are denied. Guests can open the files below their preopened directories.
// The package opens these files through os.Root, which follows no link out of such a directory.
//
// The package is pure Go and does not depend on the engine, so that its tests need no guest.
package wasi
