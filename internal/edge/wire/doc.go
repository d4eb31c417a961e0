// Package wire defines what the edge protocol sends: the payloads in the frames between a manager and a runtime (SLSocket; the
// frames are internal/channel's), the JSON envelopes on MQTT, and the names of the topics. docs/edge.md has the reference.
//
//	orchestrator ◀──Envelope on Topics──▶ manager ◀──channel.Message on a channel.Conn──▶ runtime ── modules
//
// Peers are not trusted: nothing here panics on their input, and an unknown field is kept. Bad input is
// errdefs.ErrInvalidArgument.
//
// The package does no I/O and imports only internal/channel of ours. Start reading at Envelope, ModuleData and Topics.
package wire
