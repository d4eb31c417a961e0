// Package channel implements the channels of modules, for the MQTT front door and the Wasm worker. It contains the type
// Channel and the rules for channels. It also contains the protocol's frames, and the Router that connects the modules
// of one node or one worker. docs/channels.md is the guide.
//
//	narrow frame   len:u32 LE │ control:1 module:7  │ arg:u8     │ payload     every peer; 128 modules, 256 channels
//	wide frame     len:u32 LE │ control:1 module:15 │ arg:u16    │ payload     only between two of our programs (Conn.Widen)
//	                           (u16 LE)               (u16 LE)
//
// len is the length of the payload alone. In a control message, arg is the type. In all other messages, arg is the
// number of the channel.
//
// Peers are not trusted: no frame makes this package panic, or allocate memory before the payload arrives. The error
// for bad input is errdefs.ErrInvalidArgument.
//
//	module ──Publish(Key)──▶ ┌────────┐ ──deliver──▶ other channels whose filter matches
//	                         │ Router │ ──RouterOptions.Publish──▶ broker   once
//	broker ──FromBroker────▶ └────────┘ ──deliver──▶ channels whose filter matches
//	                              └─RouterOptions.Subscribe/Unsubscribe──▶ broker   the widest filters only
//
// The Router does not subscribe to a filter that another filter covers. Otherwise a broker could send a message once
// for each matching subscription, and modules would get duplicates. The Router stores no messages; the deliver
// functions queue or drop them.
//
// The package must not import an MQTT client, a front door, the node or a kind of pod. Start reading at Channel, Conn
// and Router.
package channel
