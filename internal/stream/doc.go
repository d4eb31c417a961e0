// Package stream carries the bytes that go between a client and a container: exec, attach and port-forward
// sessions, ExecSync, and container logs.
//
//	kubelet ──CRI Exec──► internal/cri ──► Server.GetExec ──► token, one minute, one use
//	   │◄──────────────── URL http://127.0.0.1:port/exec/token ◄──┘
//	   │
//	   └──SPDY/3.1 or WebSocket──► session ──► protocol (k8s.io/cri-streaming) ──► Runtime.Exec ──► backend
//	                                  │                                                  ▲
//	                                  └── watches the connection; client gone ──► context ends
//
// The wire protocols are those of k8s.io/cri-streaming and k8s.io/streaming. What is ours is what those leave open:
//
//   - A session's context ends when its client is gone, also while nobody reads what the client sent, and the
//     connection is closed whatever happens, so that vanished clients leave neither goroutine nor descriptor.
//   - A client can neither open more SPDY streams than its request has, nor go while one is being opened, and so leave
//     the SPDY library waiting for ever.
//   - The end of a session waits for the client to read it (RFC 9112, 9.6), so that an exit code is not lost when a
//     program ends before it has read its input.
//   - WebSocket protocol v5 (stdin can be closed), which cri-streaming lacks.
//   - Tokens of 130 bits.
//
// ExecSync runs a program and gathers its output within what a CRI message can hold. PortForwardTCP joins a stream
// with a TCP port of a pod, through a dial function that knows the way into it. ReadLogs reads
// container logs in the CRI's format (internal/crilog), across rotations; OpenLogFile opens them for who writes them.
//
// The package knows containers and pods by their IDs alone; what Runtime does with them is the node's.
// See docs/adr/0007-streaming-by-cri-streaming.md.
package stream
