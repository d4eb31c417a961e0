// Package describe asks a core module of the world raw-server (sdk/wit) which gRPC services it serves, by running its
// export tripod:grpc/descriptors#describe. `tripod push` uses it; nodes take the descriptors from the image.
//
// The guest runs in wazero, which is pure Go, because the program tripod has no cgo (ADR 55). It has no directories, no
// environment and no network, and limits on memory and time.
package describe
