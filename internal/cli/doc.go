// Package cli implements the commands that talk to a running node: a small crictl over the CRI socket, for tripod and
// for any other CRI runtime (--endpoint).
//
// It sees a node exactly as a kubelet does, through k8s.io/cri-client, which also checks the answers; only the progress of
// pulls and the events that the node remembers need calls and headers of ours. It must not know how a node works inside: it
// must not import internal/node or a backend. Each group of commands is one file; App holds
// their shared streams and flags.
//
// Some commands need no node: component, wit and push, which take a WebAssembly component from its .proto file to a
// registry; call, a gRPC client; and edge, a client of the edge protocol.
//
//	tripod ps ──▶ App.withClient ──▶ Client ──▶ cri-client ──▶ unix socket
//	                                  │ resolves IDs, prefixes and names
//	tripod exec ──▶ CRI Exec ──▶ URL ──▶ SPDY or WebSocket to the streaming server
//
// # Subpackages
//
//	bench       measures CRI runtimes: tripod bench
//	call        a gRPC client that learns services by reflection: tripod call
//	check       can this host run pods, and what is missing? tripod check
//	scaffold    writes the directory of a new component: tripod component new and generate
//	toolchain   runs the user's toolchains, to generate and build components
package cli
