// Package unitpods is the runtime tripod/wasm: each module is a unit pod of the node, by default with the handler wasm.
//
//	manager                      Runtime                                   node
//	  Create ──────────────────▶ file ▶ image · directories · resources ─▶ RunSandbox, CreateContainer, StartContainer
//	  Send (messages) ─────────▶ one connection for each module's      ─▶ Channels ──▶ its worker ──▶ guest
//	  Receive ◀── queue ◀──────── channels (channels.go)               ◀─
//	                    ◀──────── module log (follow.go)               ◀── the container's CRI log
//	                    ◀──────── exited (exit.go)                     ◀── the node's events
//
// Modules outlive the daemon. The annotations of their pods contain the uuids of the runtime and the module. Adopt
// continues the log after the last line that the manager took, and reopens the channels on a new connection. Pods that
// the manager does not adopt are removed after a while. So are the images of local files that no module uses.
//
// The package must not talk to a backend, only to the node, through the interface Node. It stores nothing but its
// positions in the modules' logs, and never restarts a module. Start reading at Runtime.Create.
package unitpods
