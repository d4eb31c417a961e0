// Package artifact implements the formats in which OCI registries store WebAssembly: it builds artifacts, and opens
// those in the image store. It also determines, without an engine, what kind of binary it is given.
//
//	tripod push ── Build ── Push ──► registry ── pull ──► internal/image (finds the layout, image.Component)
//	                 │                                          │
//	               Check                                      Open ──► Artifact ──► internal/sandbox/wasm
//
// # Layouts
//
// The content of an image, never its name, determines whether it is a component:
//
//	cncf    config application/vnd.wasm.config.v0+json, a layer application/wasm, and optionally a layer
//	        application/vnd.tripod.protobuf.descriptorset.v1+protobuf, a google.protobuf.FileDescriptorSet
//	vimana  a layer application/wasm and a layer application/protobuf, the Metadata message of Vimana
//	rootfs  a container image whose entrypoint is a file with the extension .wasm
//
// The binary can also contain the FileDescriptorSet, in a custom section that is named after the layer's media type
// (SectionDescriptors). A layer takes precedence over a section.
//
// The daemon and the command line use the package; workers do not. The package is pure Go and runs no guest: it
// classifies a binary by the names in it (internal/component/wasmbin). Only the engine validates binaries.
package artifact
