// Package wit defines the values that a host and a guest exchange: the types of the component model, the flat encoding of
// values, and their layout in linear memory under the canonical ABI. Begin with [Type], [AppendString] and [Reader].
//
//	protobuf bytes ──protowit──► flat bytes ──engine (one cgo crossing, reads Program)──► guest memory
//
// The package is pure Go and does not depend on protobuf or on a WebAssembly engine. The C half of
// internal/component/engine reads the tables that [Program] writes. The documentation of [Program] describes their
// format, which includes the numbers of [Kind].
//
// # The flat encoding
//
// Type-directed, little-endian, no tags, no padding:
//
//	bool, s8, u8                    1 byte (bool: 0 or 1)
//	s16, u16                        2 bytes
//	s32, u32, f32, char             4 bytes (char: a Unicode scalar value)
//	s64, u64, f64                   8 bytes
//	string                          u32 number of bytes, then UTF-8
//	list                            u32 number of elements, then the elements (list<u8>: the raw bytes)
//	record, tuple                   the fields in order
//	variant, enum, option, result   u32 case, then the payload of that case, if it has one
//	                                (option: 0 none, 1 some; result: 0 ok, 1 error)
//	flags                           ceil(n/32) u32 words, flag i is bit i%32 of word i/32
//	own, borrow                     u32 representation: the host's number for the resource
//
// The parameters of a function are encoded as their values in order, without a count. A result is encoded as one value.
//
// Layout and flattening follow the Canonical ABI explainer of the component model
// (https://github.com/WebAssembly/component-model/blob/main/design/mvp/CanonicalABI.md).
package wit
