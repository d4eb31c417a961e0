// Package protosource compiles .proto files to descriptors, without protoc. It is apart from protowit so that a
// component's worker does not carry a compiler; the commands that read .proto files use it. It must not know what is
// done with the descriptors.
package protosource
