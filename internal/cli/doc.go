// Package cli implements the commands that talk to a running node: a small crictl over the CRI socket, for tripod and for any
// other CRI runtime (--endpoint).
//
// It sees a node exactly as a kubelet does, through k8s.io/cri-client, which also checks the answers. It must not know how a
// node works inside: no import of internal/node, internal/cri or a backend. Each group of commands is one file; App holds
// what they share (streams, endpoint, output format).
//
// Two commands need no node: wit and push, which take a WebAssembly component from its .proto file to a registry.
//
//	tripod ps ──▶ App.connect ──▶ Client ──▶ cri-client ──▶ unix socket
//	                               │ resolves IDs, prefixes and names
//	tripod exec ──▶ CRI Exec ──▶ URL ──▶ SPDY or WebSocket to the streaming server
package cli
