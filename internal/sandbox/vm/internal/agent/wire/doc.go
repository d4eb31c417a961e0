// Package wire is the protocol between the host and tripod-agent in a guest: frames on one byte stream, and streams on
// the frames. Both sides are made of it; it imports little, since the guest's program shall be small.
//
//	Open, Data, Close, Window, Resize, Cancel ──▶
//	host ═══ 00 COBS(session·stream·kind·payload·crc) 00 ═══ virtio-serial ═══ guest
//	                          ◀── Ready, Data, Close, Window, Result
//
// A virtio-serial port has no connections: either side may begin anew while the other goes on, half a frame or a whole
// buffer of an earlier time may arrive first, and nothing tells the host that the guest's program is another one by now.
// So a frame says itself where it begins and whether it is whole: it is stuffed (COBS), so that the byte 0 is nothing but the
// end of a frame, and carries a checksum. And a session has a random number, which every frame carries:
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
