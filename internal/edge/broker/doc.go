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
// A message with QoS 1 or 2 that is retained, or queued for the persistent session of a disconnected client, is
// acknowledged once it is on the disk. So are subscriptions and sessions. A message for a connected client is sent
// immediately and stored within 25 ms, unless the client acknowledges it earlier.
//
// The package knows neither the topics of the edge protocol nor modules. Even the node's own manager uses the broker
// over the network, like any other client.
package broker
