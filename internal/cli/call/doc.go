// Package call is a gRPC client for the command line: it learns a service from the server, by reflection, and speaks JSON
// with its user. It is here because the usual ones do not speak gRPC over HTTP/3, which components are served by.
//
//	JSON ──dynamicpb──► Client ──┬─ grpc-go:    HTTP/2 in clear text, or over TLS
//	                             └─ connect-go: HTTP/3
//
// Every arity is one exchange: all requests, then the replies as they come. The package knows no node.
package call
