// Package protowit maps gRPC services to component interfaces and converts messages between the protobuf wire format
// and the flat values of internal/component/wit.
//
//	FileDescriptorSet ──Compile──► Schema ──WIT──► text for guest authors (docs/wit.md has the mapping)
//	                                 │
//	                                 └ Method: what the guest exports, and per message
//	                                     Message.Decode   protobuf bytes ──► flat bytes
//	                                     Message.Encode   flat bytes ──► protobuf bytes
//
// The package is pure Go and runs no guest. Begin with [Parse].
//
// # Semantics
//
// The semantics are those of google.golang.org/protobuf. A differential fuzz test compares the results of both
// packages. Fields can be in any order, and the last value of a scalar wins. If a message field occurs several times,
// the parts are merged, also in a oneof. Both packed and unpacked lists are read. Varints of up to ten bytes are cut to
// the width of the field. The last entry for a map key wins, and a missing key or value is the default. Unknown enum
// numbers are kept. In the following points, this package decides for itself:
//
//   - Unknown fields, including extensions, are checked and dropped, because guests do not forward messages.
//   - Strings must be UTF-8, even in proto2, because WIT has no other strings.
//   - Messages may nest [MaxDepth] deep.
//   - All enums are open, as in Go. This includes enums that proto2 declares closed.
//   - A required field (proto2) that is missing from a map entry is an error, even if a later entry replaces that
//     entry.
//   - Recursive messages stay serialized, but are checked (see cycles.go).
//
// # Implementation
//
// Decoding reads a message twice. The first pass reads the tags. For each field of the WIT record, it saves the last
// value, or the regions of the input that contain the values. The second pass writes the flat fields in the order of
// the record, and recurses. The memory for the first pass is reused, so a conversion allocates only its result.
// Encoding also takes two passes: the first measures, the second writes. As a result, a long bytes field is copied only
// once in either direction.
//
// # Subpackages
//
//	protosource   compiles .proto files to descriptors, without protoc
package protowit
