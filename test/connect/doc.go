// Package connect runs the public conformance suite of Connect, gRPC and gRPC-Web against a component, over HTTP/1.1,
// HTTP/2 and HTTP/3. Each server that the suite requests runs as a pod. docs/conformance.md lists the cases that fail,
// and why.
//
// TestInterop runs the public gRPC interop cases against a Go server (test/guests), over HTTP/2 and HTTP/3.
// TestInteropFromGuest runs them in a Go guest, which calls a grpc-go server.
//
// The suite's runner (hack/connect/go.mod pins its version, make test-connect builds it) calls
// examples/wasm/conformance-js and a Go server (test/guests/conformance). For each kind of server, the runner starts this
// test binary again. The binary then runs a pod with the certificates and limits that the runner requests. Begin reading
// with TestConformance.
package connect
