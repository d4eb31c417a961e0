// Package artifact is the format of WebAssembly in OCI registries: it builds artifacts and opens those in the image store. It
// also says, without an engine, what a binary is.
//
//	tripod push ── Build ── Push ──► registry ── pull ──► internal/image (finds the layout, image.Component)
//	                 │                                          │
//	               Check                                      Open ──► Artifact ──► internal/sandbox/wasm
//
// # Layouts
//
// An image is a component by its content, never by its name:
//
//	cncf    config application/vnd.wasm.config.v0+json, a layer application/wasm, and perhaps a layer
//	        application/vnd.tripod.protobuf.descriptorset.v1+protobuf, a google.protobuf.FileDescriptorSet
//	vimana  a layer application/wasm and a layer application/protobuf, the Metadata message of the public system
//	rootfs  a container image whose entrypoint is a file that ends in ".wasm"
//
// A FileDescriptorSet may also travel inside the binary, as a custom section of the component named like the layer's
// media type (SectionDescriptors). A layer goes before a section.
//
// The daemon and the command line use the package; workers do not. It is pure Go and runs no guest: what it says of a binary
// comes from names (internal/component/wasmbin). Only the engine validates binaries.
package artifact
