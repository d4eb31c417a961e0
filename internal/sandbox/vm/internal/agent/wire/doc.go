// Package wire implements the protocol between the host and tripod-agent in a guest: frames on one byte stream, and
// streams in the frames. Both sides use the package. It imports little, to keep the guest's program small. Begin with
// Mux.
//
//	Open, Data, Close, Window, Resize, Cancel ──▶
//	host ═══ 00 COBS(session·stream·kind·payload·crc) 00 ═══ virtio-serial ═══ guest
//	                          ◀── Ready, Data, Close, Window, Result
//
// A virtio-serial port has no connections. Either side may restart while the other keeps running. Half a frame or a
// whole buffer from an earlier session may arrive first, and nothing tells the host that the guest's program has
// restarted. So frames delimit themselves: they are encoded with COBS, and the byte 0 occurs only at the end of a
// frame. Each frame has a checksum and the random number of its session:
//
//	host connects          ── Hello(session) ──▶  the guest ends all jobs of other sessions
//	guest's program starts
//	or has lost its host   ◀── Ready ──           the host ends its session and sends Hello again
//	                       ◀── Welcome(session)   from here on, frames of other sessions are ignored
//
// This needs no timers or polling: a host whose guest has no agent simply waits for Ready.
//
// Each channel of a stream has a window: the number of bytes that the receiver has room for. The sender sends no more
// than that, so the goroutine that reads the frames never waits for a stream. The host has room for Window bytes from
// the beginning. The guest sends its first KindWindow when the operation can take input. A violation of the rules ends
// the session, but not the receiver's process.
//
// The package does not know what operations mean and starts nothing. It must not import the rest of Tripod.
package wire
