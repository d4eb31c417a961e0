// Wasmbench measures what `tripod bench` cannot measure: how fast components answer, compared with a bare HTTP/3
// handler.
//
//	wasmbench ──CRI──► pods of faults-c (examples/wasm): Echo, Spin
//	    │ gRPC over HTTP/3, one client for both
//	    ├──────► the component, on its pod's IP: a fresh instance for each request
//	    └──────► `wasmbench echo`: quic-go's http3.Server with a ten-line handler, in the same network namespace
//
// The component and the bare handler are measured in turns, so that changes in the machine's load affect both.
// `wasmbench peers` compares Greeters with the same server natively, by grpc-go, over HTTP/2 without TLS.
// `wasmbench serve` compares components of wasi:http with `wasmtime serve`, over HTTP/1.1.
// `wasmbench first` measures the start of the first pod of an image that the node has just pulled.
//
// Wasmbench prints its report as Markdown.
package main
