// Package broker is the embedded MQTT broker of a node or an orchestrator, for sites without a broker: mochi behind a
// small interface, with what mochi lacks.
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
// acknowledged once it is on the disk. The same holds for subscriptions and sessions. A message for a connected client
// is sent immediately and stored within 25 ms, unless it is acknowledged before.
//
// The package knows neither the topics of the edge protocol nor modules. It is used only over the network: the node's
// own manager is a client like any other.
package broker
