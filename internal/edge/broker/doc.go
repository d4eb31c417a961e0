// Package broker is the MQTT broker that a node or an orchestrator carries with it, for a site that has none: mochi behind a
// small interface, with what that one lacks.
//
//	listener ─▶ conn ─▶ mochi ─▶ hooks: peers   bridge bit, empty password, No Local; limits
//	  TCP, TLS   held               │   users   who may come in, and which topics are open to him
//	             until stored       │   flow    the client's receive maximum
//	                                └─▶ persist ─▶ store (bbolt): sessions, their messages, retained messages
//
// It serves MQTT 3.1.1 and 5.0, and so the public peers of the edge protocol: these set the bridge bit of the protocol level
// (0x84) and send a user name with a password flag and no password.
//
// A message with QoS 1 or 2 that is retained, or that waits for a client with a session who is away, is acknowledged when it is
// on the disk; so are a subscription and a session. A message for a client who is there is on its way already and is stored
// behind it, within 25 ms.
//
// The package knows nothing of the topics of the edge protocol, and nothing of modules. Nothing in it may be used without the
// network: the node's own manager is a client like others.
package broker
