// Package guestapi is what the daemon and the program tripod-guest say to each other about the containers in a machine.
// Both use the package: the calls are operations of the kind wire.OpService on the agent's port.
//
//	daemon ── Request (JSON) ──▶ tripod-guest    the stream's request
//	       ── body (JSON)    ──▶                 ChannelIn: the arguments of the method
//	       ◀── answer (JSON) ──                  ChannelOut: the result of the method
//
// In the calls Exec, Attach, Log and Events the channels carry other data; see the methods.
package guestapi
