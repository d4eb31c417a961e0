// Package protosource compiles .proto files to descriptors, without protoc. It is separate from protowit so that the
// worker of a component does not include a compiler. Only commands that read .proto files use this package. It must not
// depend on how the descriptors are used.
package protosource
