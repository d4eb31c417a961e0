// Wasmbench measures what `tripod bench` cannot know of: how fast components answer, beside a bare HTTP/3 handler.
//
//	wasmbench ──CRI──► pods of faults-c (examples/wasm): Echo, Spin
//	    │ gRPC over HTTP/3, one client for both
//	    ├──────► the component, on its pod's IP: a fresh instance for each request
//	    └──────► `wasmbench echo`: quic-go's http3.Server and a handler of ten lines, inside the same network namespace
//
// The two are asked in turns, so that a change of the machine's load meets both. The report is Markdown on stdout.
package main
