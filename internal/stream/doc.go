// Package stream carries the bytes between clients and containers: exec, attach and port-forward sessions, ExecSync,
// and container logs.
//
//	kubelet ──CRI Exec──► internal/cri ──► Server.GetExec ──► token, one minute, one use
//	   │◄──────────────── URL http://127.0.0.1:port/exec/token ◄──┘
//	   │
//	   └──SPDY/3.1 or WebSocket──► session ──► protocol (k8s.io/cri-streaming) ──► Runtime.Exec ──► backend
//	                                  │                                                  ▲
//	                                  └── watches the connection; client gone ──► context ends
//
// k8s.io/cri-streaming and k8s.io/streaming implement the wire protocols. This package adds what they lack:
//
//   - A session's context ends when its client is gone, even if nothing reads what the client sent. The connection is
//     always closed, so clients that vanish leave no goroutines and no descriptors.
//   - The SPDY library waits forever if a client opens more streams than it requested, or vanishes while a stream is
//     being opened. spdyGuard prevents both.
//   - A closed session gives the client time to read the last bytes (RFC 9112, 9.6). Otherwise the exit code could be
//     lost if a program ends before it has read its input.
//   - WebSocket protocol v5, which lets the client close stdin.
//   - Tokens have 130 random bits.
//
// In the daemon, a Dispatcher issues the URLs. The sessions run in a carrier, a process of their own that outlives the
// daemon (Carry), so a restart of the daemon does not end them:
//
//	daemon:  internal/cri ──► Dispatcher.GetExec ──► Planner (the node): where does the session lead?
//	                              ├──► a ticket file: request and plan
//	                              └──► starts the carrier, if none runs, with the TCP listener
//	carrier: client ──► Server ──► redeems the ticket ──► sandbox.SessionServer of the kind ──► container
//
// The Dispatcher serves a session in the daemon only if the backend cannot plan it.
//
// ExecSync runs a program and collects as much output as fits into a CRI message. PortForwardTCP connects a stream to a
// TCP port of a pod, through a dial function for the pod's network. OpenLogFile opens container logs for writing, and
// ReadLogs reads them across rotations, in the CRI's format (internal/crilog).
//
// The package knows containers and pods only by their IDs; the node implements Runtime and Planner.
// See docs/adr/0007-streaming-by-cri-streaming.md and docs/adr/0047-sessions-outlive-the-daemon.md.
package stream
