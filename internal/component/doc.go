// Package component is the root of a library that runs WebAssembly components and command modules in Go. It does not
// depend on pods, images or the network. From the rest of this module it imports only sdk/wit; test/deps checks this.
// This root package has no code. The library is the packages below it, and the examples here show how to combine them.
//
//	                ┌─ protowit ── protobuf messages as component values, WIT for a service
//	your program ───┤                       │ flat values
//	                ├─ wit ─────── types of the component model, flat values
//	                │                       ▼
//	                ├─ engine ──── compile, load, instantiate, call (wasmtime, by cgo)
//	                │    ▲ Host: the functions that guests may import
//	                ├─ wasi, wasihttp ── WASI 0.2: streams, files, clocks, HTTP
//	                └─ wasmbin ─── what a binary imports and exports, without running it
//
// # Subpackages
//
//	engine     compiles guests, loads, instantiates and calls them, in wasmtime
//	wit        types of the component model, flat values and their layout
//	protowit   protobuf messages as component values, and the WIT of a service; protosource, below it, reads .proto files
//	wasi       WASI 0.2 without wasi:http, and proposals of WASI
//	wasihttp   wasi:http: serves requests with guests, and sends theirs
//	wasmbin    reads and rewrites binaries without running them
//	describe   asks a core module which gRPC services it serves
//
// # Where to begin
//
//   - To call a function of a component: engine.New, then Compile, Load, Func, Instantiate and Call. See the example "Call".
//   - To make values: package wit. It documents the flat encoding, appends flat values to a slice and reads flat
//     values.
//   - To serve a gRPC service from a component: protowit.Parse returns a Schema, which says what the component must
//     export and converts the messages. The example "Protobuf" converts one message both ways.
//   - To offer your own functions to a component: engine.Host. Package wasihttp is such a host, for wasi:http.
//   - To inspect a file before compiling it: wasmbin.Read.
//
// # What a caller must know
//
// Compiling takes CPU and memory in proportion to the guest, so compile in a process with limits. The resulting code
// image is machine code: load only images that you have compiled yourself. A guest that traps or is killed leaves a
// dead instance and does no other harm. engine.InstanceOptions limits time, memory and handles.
//
// Package engine, and wasihttp through it, need cgo. All others are pure Go.
package component
