// Package wit holds the interfaces between a gRPC guest and its host: the WIT package tripod:grpc. They are versioned,
// and every guest language may use the files as they are.
package wit

import _ "embed"

// Host is the part of the package that every gRPC component uses: types and response metadata.
//
//go:embed tripod-grpc.wit
var Host string

// Raw is the part for guests that exchange protobuf bytes. It belongs to the same package, so it follows Host.
//
//go:embed tripod-grpc-raw.wit
var Raw string

// Client is the part for guests that exchange protobuf bytes with other servers. It follows Raw.
//
//go:embed tripod-grpc-client.wit
var Client string
