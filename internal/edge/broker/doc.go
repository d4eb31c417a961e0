// Package broker is the embedded MQTT broker of a node or an orchestrator, for sites without a broker. docs/mqtt.md lists
// what MQTT 3.1.1 and 5.0 ask of a server, with the test of each statement.
//
//	listener ─▶ conn ─ packets ─▶ handle ─▶ publish ─ tree ─▶ session ─▶ conn
//	  TCP, TLS, WebSocket            │         │                │  queue, window, QoS
//	                                 └─────────┴──── records ◀──┘
//	                                                   └─▶ store (bbolt): one transaction for all that one packet changes
//
// It serves MQTT 3.1, 3.1.1 and 5.0, including the public peers of the edge protocol, which set the bridge bit of the
// protocol level (0x84) and send the password flag with an empty password.
//
// What the broker promises when it is killed:
//
//	QoS 0   nothing; a message reaches the clients that are connected and read
//	QoS 1   a message that is retained, or for a persistent session, is on the disk before it is acknowledged
//	QoS 2   in addition, a message for a persistent session is on the disk before it is sent, and so is each further step,
//	        so that the message arrives once
//
// Sessions, subscriptions and wills are on the disk before they are acknowledged. If the disk fails, the broker goes on
// with its memory and tries again (ADR 28).
//
// The package knows neither the topics of the edge protocol nor modules. Even the node's own manager uses the broker
// over the network, like any other client.
package broker
