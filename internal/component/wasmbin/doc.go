// Package wasmbin reads and rewrites WebAssembly binaries without running them.
//
//   - [Read] returns the outline of a file: whether it is a module or a component, the names of its imports and
//     exports, and the names of its custom sections. It reads section headers and the few sections with names, but
//     never code, so a large file needs only a few small reads. [Custom] reads one custom section.
//   - [Parse] returns the structure of a binary in memory: what its core modules declare, and which functions of the
//     core modules the component exports.
//   - [NewPlan] makes one core module of a component, and [Detach] separates a core module from its memory.
//
// A binary has this form:
//
//	preamble  \0asm version layer       a module has layer 0, a component layer 1
//	section   id size(LEB128) content   ... until the end of the file
//
// Sources: WebAssembly core specification 2.0, "Binary Format / Modules"; WebAssembly/component-model, "Binary.md".
//
// The package does not validate binaries; the engine does. For a binary that it cannot read, it returns
// errdefs.ErrInvalidArgument. It never panics, and Read uses no more memory than [Max].
package wasmbin
