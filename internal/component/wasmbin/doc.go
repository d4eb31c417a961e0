// Package wasmbin reads the outline of WebAssembly binaries: whether a file is a module or a component, what it imports
// and exports by name, and its custom sections. It reads section headers and the few sections that hold names, never
// code, so that a large binary costs a few small reads.
//
//	preamble  \0asm version layer       a module has layer 0, a component layer 1
//	section   id size(LEB128) content   …until the end of the file
//
// Sources: WebAssembly core specification 2.0, "Binary Format / Modules"; WebAssembly/component-model, "Binary.md".
//
// That a binary is valid is for the engine to say. What is wrong with one here is errdefs.ErrInvalidArgument with the
// offset; nothing in a file makes this package panic or take memory beyond Max.
package wasmbin
