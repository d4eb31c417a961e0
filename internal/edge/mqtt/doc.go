// Package mqtt is the MQTT client of the edge front door. It has a small interface for MQTT 5.0 and MQTT 3.1.1, and
// reconnects by itself.
//
//	Publish ──QoS 0──────────────────────────────▶ link ──▶ broker
//	        ──QoS 1, 2──▶ queue (bounded, TTL) ────▶  │
//	Subscribe ──▶ table ──after each connect───────▶  │
//	Handler ◀──in order── inbox (bounded) ◀───────────┘
//
// A Client connects in the background, even if the broker is unavailable at the start, and reconnects after each loss
// with an increasing delay. After each connect it renews all subscriptions and calls OnConnect, so that the Client's
// owner can register again. While the broker is unavailable, messages published with QoS 1 or 2 wait in a bounded queue
// with a time to live. A full queue drops its oldest messages and counts them.
//
// Messages received with QoS 1 or 2 are acknowledged once the Handler has returned, so a slow Handler slows the broker
// down and loses no messages. If the Handler is too slow for messages received with QoS 0, the oldest of them are
// dropped and counted.
//
// With NoLocal the client does not receive its own messages. It uses the No Local option in MQTT 5.0 (§3.8.3.1), and
// the bridge bit of the protocol level (0x84) in MQTT 3.1.1.
//
// The package knows neither the content of messages, nor the topics of the edge protocol, nor modules.
package mqtt
