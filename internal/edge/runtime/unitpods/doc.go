// Package unitpods is the runtime tripod/wasm: modules are unit pods of the node, with the handler for Wasm components.
//
//	manager                      Runtime                                   node
//	  Create ──────────────────▶ file ▶ image · directories · resources ─▶ RunSandbox, CreateContainer, StartContainer
//	  Send (messages) ─────────▶ one connection for each module's      ─▶ Channels ──▶ its worker ──▶ guest
//	  Receive ◀── queue ◀──────── channels (channels.go)               ◀─
//	                    ◀──────── module log (follow.go)               ◀── the container's CRI log
//	                    ◀──────── exited (exit.go)                     ◀── the node's events
//
// Modules outlive the daemon: their pods carry the runtime's and the module's uuid as labels, and Adopt goes on with them:
// with the log from the line that was last handed over, with the channels on a new connection. A pod of the runtime that
// nobody adopts is removed after a while, and so are images of local files that no module uses.
//
// The package must not talk to a backend, only to the node through the interface that it declares; it keeps no record of its
// own beside where it is in a module's log, and takes no decision about starting a module anew.
package unitpods
