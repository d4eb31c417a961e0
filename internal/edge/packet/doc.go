// Package packet encodes and decodes the control packets of MQTT 3.1, 3.1.1 and 5.0. The broker and the client use it.
//
// Decode is strict: it refuses everything that the specification calls a malformed packet or a protocol error and that
// shows in the packet alone, so that the layers above see only well-formed packets. What depends on the connection or
// the session (limits, unknown identifiers, packets that only a server sends) is left to them.
//
// A level is the protocol level of CONNECT: 3 for MQTT 3.1, 4 for 3.1.1, 5 for 5.0.
package packet
