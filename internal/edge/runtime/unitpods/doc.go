// Package unitpods is the runtime tripod/wasm: each module is a unit pod of the node, by default with the handler wasm.
//
//	manager                      Runtime                                   node
//	  Create ──────────────────▶ file ▶ image · directories · resources ─▶ RunSandbox, CreateContainer, StartContainer
//	  Send (messages) ─────────▶ one connection for each module's      ─▶ Channels ──▶ its worker ──▶ guest
//	  Receive ◀── queue ◀──────── channels (channels.go)               ◀─
//	                    ◀──────── module log (follow.go)               ◀── the container's CRI log
//	                    ◀──────── exited (exit.go)                     ◀── the node's events
//
// Modules outlive the daemon. Their pods carry the uuids of the runtime and the module, and Adopt resumes them: the log after the
// line that was last handed over, the channels on a new connection. Pods that nobody adopts and images of local files that no
// module uses are removed after a while.
//
// The package must not talk to a backend, only to the node, through the interface that it declares. It records nothing but its
// position in the modules' logs, and never restarts a module. Start reading at Runtime.Create.
package unitpods
