// Package connect runs the public conformance suite of Connect, gRPC and gRPC-Web against a component, over HTTP/1.1, HTTP/2 and
// HTTP/3. It owns how a server of the suite becomes a pod; which cases fail, and why, is in docs/conformance.md.
//
// The suite's runner (hack/connect/go.mod pins it, make test-connect builds it) calls examples/wasm/conformance-js. For each kind
// of server it starts this test binary once more, which runs a pod with the certificates and limits that the runner names. Begin
// reading with TestConformance.
package connect
