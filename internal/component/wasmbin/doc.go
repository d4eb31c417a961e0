// Package wasmbin reads WebAssembly binaries without running them.
//
//   - [Read] gives the outline of a file: whether it is a module or a component, the names that it imports and exports, and those of
//     its custom sections. It reads section headers and the few sections that hold names, never code, so that a large file costs a
//     few small reads. [Custom] reads one custom section.
//   - [Parse] gives the structure of a binary in memory: what its core modules declare, and which of their functions the
//     component exports.
//
// A binary:
//
//	preamble  \0asm version layer       a module has layer 0, a component layer 1
//	section   id size(LEB128) content   …until the end of the file
//
// Sources: WebAssembly core specification 2.0, "Binary Format / Modules"; WebAssembly/component-model, "Binary.md".
//
// The package does not validate: the engine does. What is wrong with a binary here is errdefs.ErrInvalidArgument; nothing in a
// binary makes this package panic, and Read takes no memory beyond [Max].
package wasmbin
