// Package channel is where the channels of a node's modules meet: a message of a module goes to every other channel of the
// node that it is for, at once and without the broker, and once to the broker (Seed 4, "Publish Message").
//
//	module ──Publish(Key)──▶ ┌────────┐ ──deliver──▶ other channels of the node whose filter matches
//	                         │ Router │ ──Options.Publish──▶ broker   once
//	broker ──FromBroker────▶ └────────┘ ──deliver──▶ channels whose filter matches
//	                              └─Options.Subscribe/Unsubscribe──▶ broker   the widest filters only, each once
//
// A filter that another one covers is not subscribed to: a broker may send a message once for each subscription that matches,
// and a module is to have it once. Topics come expanded (wire.Topics.Expand).
//
// The package must not know MQTT clients, runtimes or nodes, and keeps no message: what cannot be delivered is the business of
// those who deliver.
package channel
