// Package channel has what the edge front door and the Wasm worker share about channels: the type and its rules, the frames in
// which they speak, and the Router that delivers between the modules of one node or one worker. docs/channels.md is the guide.
//
//	narrow frame   len:u32 LE │ control:1 module:7  │ arg:u8     │ payload     every peer; 128 modules, 256 channels
//	wide frame     len:u32 LE │ control:1 module:15 │ arg:u16    │ payload     only between two of our programs (Conn.Widen)
//	                           (u16 LE)               (u16 LE)
//
// len counts the payload only. arg is the type of a control message, otherwise the number of the channel.
//
// Frames come from peers that are not trusted: nothing here panics on them or allocates what a header only promises. Bad input
// is errdefs.ErrInvalidArgument.
//
//	module ──Publish(Key)──▶ ┌────────┐ ──deliver──▶ other channels whose filter matches
//	                         │ Router │ ──RouterOptions.Publish──▶ broker   once
//	broker ──FromBroker────▶ └────────┘ ──deliver──▶ channels whose filter matches
//	                              └─RouterOptions.Subscribe/Unsubscribe──▶ broker   the widest filters only
//
// The Router does not subscribe to a filter that another one covers: a broker may send a message once for each subscription that
// matches, and a module is to have it once. It keeps no message; whoever delivers decides what happens to one that does not fit.
//
// The package knows no MQTT client, front door, node or kind of pod. Start reading at Channel, Conn and Router.
package channel
