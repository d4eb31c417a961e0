// Package wire defines the messages of the edge protocol: the payloads between a manager and a runtime (SLSocket, with
// the frames of internal/channel), the JSON envelopes on MQTT, and the names of the topics. docs/edge.md is the
// reference.
//
//	orchestrator ◀──Envelope on Topics──▶ manager ◀──channel.Message on a channel.Conn──▶ runtime ── modules
//
// Peers are not trusted: no input makes this package panic. Unknown fields are kept. The error for bad input is
// errdefs.ErrInvalidArgument.
//
// The package does no I/O. Of our packages, it imports only internal/channel. Start reading at Envelope, ModuleData and
// Topics.
package wire
