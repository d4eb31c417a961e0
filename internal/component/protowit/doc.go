// Package protowit maps gRPC services to component interfaces and converts their messages between the protobuf wire
// format and the flat values of internal/component/wit.
//
//	FileDescriptorSet ──Compile──► Schema ──WIT──► text for guest authors (docs/wit.md has the mapping)
//	                                 │
//	                                 └ Method: what the guest exports, and per message
//	                                     Message.Decode   protobuf bytes ──► flat bytes
//	                                     Message.Encode   flat bytes ──► protobuf bytes
//
// It is pure Go and runs no guest. Begin with [Parse].
//
// # Semantics
//
// The semantics are those of google.golang.org/protobuf, the oracle of the differential fuzz test. Fields can be in any
// order, and the last value of a scalar wins. The parts of a message are merged (also as a member of a oneof). Both
// packed and unpacked lists are read. Varints of up to ten bytes are cut to the width of the field. The last entry for
// a map key wins, and a missing key or value is the default. Unknown enum numbers are kept. Decisions of this package:
//
//   - Unknown fields (extensions too) are checked and dropped, because guests do not forward messages.
//   - Strings must be UTF-8, also in proto2, because WIT has no other strings.
//   - Messages may nest [MaxDepth] deep.
//   - Enums are open, even those that proto2 declares closed, as in Go.
//   - A required field (proto2) that is missing from a map entry is an error, even if a later entry replaces it.
//   - Recursive messages stay serialized, but are checked (see cycles.go).
//
// # Implementation
//
// Decoding reads a message twice. The first pass reads the tags and records, for each field of the WIT record, the last
// value or the regions of the input with its values. The second pass writes the flat fields in the order of the record,
// and recurses. The memory for the first pass is reused, so a conversion allocates only its result. Encoding also takes
// two passes: the first measures, the second writes. So a long bytes field is copied only once in either direction.
package protowit
