// Package protosource compiles .proto files to descriptors, without protoc. It is separate from protowit so that a
// component's worker does not include a compiler; only commands that read .proto files use it. It must not depend on
// how the descriptors are used.
package protosource
