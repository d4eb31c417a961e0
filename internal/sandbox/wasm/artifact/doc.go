// Package artifact implements the formats of WebAssembly artifacts in OCI registries. It builds artifacts, and opens
// the artifacts in the image store. It also determines the world of a binary, without an engine.
//
//	tripod push ── Build ── Push ──► registry ── pull ──► internal/image (finds the layout, image.Component)
//	                 │                                          │
//	               Check                                      Open ──► Artifact ──► internal/sandbox/wasm
//
// # Layouts
//
// An image's content, never its name, determines whether the image contains a component:
//
//	cncf    config application/vnd.wasm.config.v0+json, a layer application/wasm, and optionally a layer
//	        application/vnd.tripod.protobuf.descriptorset.v1+protobuf (a google.protobuf.FileDescriptorSet) and two with
//	        compiled code and its signature, application/vnd.tripod.wasm.code.v1+zstd and application/vnd.dsse.envelope.v1+json
//	vimana  a layer application/wasm and a layer application/protobuf (Vimana's Metadata message)
//	rootfs  a container image whose entrypoint is a file with the extension .wasm
//
// The binary can also contain the FileDescriptorSet, in a custom section whose name is the layer's media type
// (SectionDescriptors). A layer takes precedence over a section.
//
// The daemon and the command line use the package; workers do not. The package is pure Go and runs no guest: it
// classifies a binary by the names in it (internal/component/wasmbin). Only the engine validates binaries.
package artifact
