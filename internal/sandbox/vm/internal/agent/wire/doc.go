// Package wire is the protocol between the host and tripod-agent in a guest: frames on one byte stream, and streams on
// the frames. Both sides are made of it; it imports little, since the guest's program shall be small.
//
//	Open, Data, Close, Window, Resize, Cancel ──▶
//	host ═══ 00 COBS(session·stream·kind·payload·crc) 00 ═══ virtio-serial ═══ guest
//	                          ◀── Ready, Data, Close, Window, Result
//
// A virtio-serial port has no connections. Either side may restart while the other goes on, half a frame or a whole buffer from
// before may arrive first, and nothing tells the host that the guest's program is a new one. So frames delimit themselves and
// carry a checksum: they are stuffed (COBS), so that the byte 0 occurs only at the end of a frame. And every frame carries the
// random number of its session:
//
//	host connects        ── Hello(session) ──▶   whatever the guest did for another session is ended
//	guest's program starts
//	or finds nobody there  ◀── Ready ──          whatever session there was is over; the host says Hello again
//	                       ◀── Welcome(session)  from here on only frames of this session count
//
// No timer is needed for it, and nobody polls: a host whose guest has no agent waits for Ready.
//
// Each channel of a stream has a window: as many bytes may be on the way as the receiver has room for, so that the reader of
// the frames never waits for a stream. The host has room for Window bytes from the beginning; the guest's first KindWindow says
// that what the stream is for is up. What breaks these rules ends the session, not the program.
//
// The package knows no operation's meaning and starts nothing; it must not import the rest of Tripod.
package wire
