// Package component is the root of a library that runs WebAssembly components and command modules in Go. It knows neither pods nor
// images nor the network; it imports nothing of this module outside of itself, which test/deps checks. The root has no code: the
// packages below are the library, and the examples here show how they go together.
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
// # Where to begin
//
//   - To call a function of a component: engine.New, then Compile, Load, Func, Instantiate and Call. The example "Call" does these
//     in order.
//   - To make values: package wit documents the flat encoding; it appends values to a slice and reads them from one.
//   - To serve a gRPC service from a component: protowit.Parse says what the component exports and converts the messages. The
//     example "Protobuf" converts one message both ways.
//   - To give a component functions of your own: engine.Host. Package wasihttp is a host that does so for wasi:http.
//   - To see what a file is before anything is compiled: wasmbin.Read.
//
// # What a caller must know
//
// Compiling takes CPU and memory in proportion to the guest; do it in a process with limits. Its result, the code image, is machine
// code: load only images that you have compiled yourself. A guest that traps or is killed leaves a dead instance and nothing
// more; limits on time, memory and handles are engine.InstanceOptions.
//
// Packages engine and wasihttp need cgo. All others are pure Go.
package component
