// Package call is a gRPC client for the command line: it learns a service from the server by reflection and exchanges
// JSON with its user. It exists because the common clients do not support gRPC over HTTP/3, which components serve.
//
//	JSON ──dynamicpb──► Client ──┬─ grpc-go:    HTTP/2 in clear text, or over TLS
//	                             └─ connect-go: HTTP/3
//
// Each call sends all requests and passes on the replies as they arrive. The package must not know about nodes.
package call
