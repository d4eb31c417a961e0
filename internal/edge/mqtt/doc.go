// Package mqtt is the client of the edge front door: one small interface over MQTT 5.0 and MQTT 3.1.1, for a broker that
// comes and goes.
//
//	Publish ──QoS 0──────────────────────────────▶ link ──▶ broker
//	        ──QoS 1, 2──▶ queue (bound, TTL) ──────▶  │
//	Subscribe ──▶ table ──after each connect───────▶  │
//	Handler ◀──in order── inbox (bound) ◀─────────────┘
//
// A Client is made once and lives as long as its owner. It connects by itself, also when the broker is away at the start, and
// again after each loss, with a delay that grows; then it makes every subscription again and calls OnConnect, so that its owner
// can register again. What is published with QoS 1 or 2 while the broker is away waits in a queue with a bound and a time to
// live; what is dropped there is counted, the oldest first.
//
// What is received with QoS 1 or 2 is acknowledged when the Handler has returned, so a slow Handler slows the broker down and
// loses nothing of it; messages with QoS 0 are dropped, the oldest first, and counted.
//
// With NoLocal nothing comes back that this client published: the No Local option of MQTT 5.0 (§3.8.3.1), the bridge bit of
// the protocol level (0x84) for MQTT 3.1.1.
//
// The package knows nothing of what the messages say, of topics of the edge protocol, or of modules.
package mqtt
