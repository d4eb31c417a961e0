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
// Those of google.golang.org/protobuf, which is the oracle of the differential fuzz test: fields in any order, the last
// value of a scalar wins, the parts of a message are merged (also as the member of a oneof), both packed and unpacked lists
// are read, varints of up to ten bytes are cut to the width of the field, the last entry of a map's key wins, a missing key
// or value is the default, unknown numbers of enums are kept. Decided here:
//
//   - Unknown fields (extensions too) are checked and dropped: a guest forwards no messages.
//   - Strings must be UTF-8, also in proto2, since WIT has no others.
//   - Messages may nest [MaxDepth] deep.
//   - Enums are open, also those that proto2 declares closed, as they are in Go.
//   - A required field (proto2) that is missing in an entry of a map is an error even if a later entry replaces the entry.
//   - Messages that recur stay serialized, and are checked (see cycles.go).
//
// # How it is done
//
// A message is read twice. The first pass reads the tags and notes, per field of the record, the last value or the regions of
// the input with its values. The second writes the flat fields in the order of the record, and recurs. Memory for the notes is
// reused: a conversion allocates nothing but its result. Encoding also takes two passes, one that measures and one that
// writes, so a long bytes field is copied once in either direction.
package protowit
