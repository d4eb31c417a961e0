// Package broker is the embedded MQTT broker of a node or an orchestrator, for sites without a broker. It puts mochi
// behind a small interface, and adds what mochi lacks.
//
//	listener ─▶ conn ─▶ mochi ─▶ hooks: peers   bridge bit, empty password, No Local; limits
//	  TCP, TLS   held               │   users   credentials and access to topics
//	             until stored       │   flow    the client's receive maximum
//	                                └─▶ persist ─▶ store (bbolt): sessions, their messages, retained messages
//
// It serves MQTT 3.1.1 and 5.0, including the public peers of the edge protocol, which set the bridge bit of the
// protocol level (0x84) and send the password flag with an empty password.
//
// What the broker promises when it is killed:
//
//	QoS 0   nothing; a message reaches the clients that are connected and read
//	QoS 1   a message that is retained, or queued for the persistent session of a disconnected client, is on the disk
//	        before it is acknowledged. A message for a connected client is sent immediately and stored within 25 ms,
//	        unless the client acknowledges it earlier
//	QoS 2   in addition, a message for a persistent session is on the disk before it is sent and before it is
//	        acknowledged, and so is each further step, so that the message arrives once
//
// Subscriptions and sessions are on the disk before they are acknowledged. received.go has the QoS 2 of messages from
// clients, persist.go that of messages to clients.
//
// The package knows neither the topics of the edge protocol nor modules. Even the node's own manager uses the broker
// over the network, like any other client.
package broker
