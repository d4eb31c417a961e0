package broker

import (
	"io"
	"slices"
	"sync"
	"time"

	"github.com/tripod-run/tripod/internal/edge/packet"
)

// readSize is the size of the buffers for reading. A packet that does not fit gets a buffer of its own.
const readSize = 16 << 10

var readBuffers = sync.Pool{New: func() any { return new([readSize]byte) }}

// reader reads packets from a connection. While it waits for a packet, it has no buffer, because most connections of a
// broker are idle.
type reader struct {
	conn       *conn
	buf        *[readSize]byte
	r, w, size int32     // size is that of the last packet's remaining length, in bytes
	bare       bool      // it waits without a buffer: not before CONNECT, and not with TLS or WebSocket
	refused    bool      // it could not be parked the last time
	fast       uint8     // reads in a row, up to attachAfter, that came within parkAfter of each other
	silent     time.Time // since when the client has said nothing; zero while it is not known to be silent
}

// next returns the next packet's first byte and what follows its remaining length, of at most limit bytes. The bytes are
// valid until the next call; own reports that they are the caller's. keepAlive bounds the time from one packet to the
// next; 0 means no bound.
func (r *reader) next(keepAlive time.Duration, limit int64, level byte) (first byte, body []byte, own bool, err error) {
	for {
		have := r.have()
		if len(have) > 1 {
			length, size := packet.Length(have[1:])
			switch {
			case size < 0:
				return 0, nil, false, &packet.Error{Code: packet.Malformed, Text: "the remaining length has more than four bytes"}
			case size > 0:
				r.size = int32(size)
				if err := packet.CheckLength(length, size, level); err != nil {
					return 0, nil, false, err
				}
				head := 1 + size
				if int64(head+length) > limit {
					return 0, nil, false, &packet.Error{Code: packet.TooLarge, Text: "a packet is larger than the broker accepts"}
				}
				first := have[0]
				if len(have) >= head+length {
					r.r += int32(head + length)
					return first, have[head : head+length], false, nil
				}
				if head+length > readSize {
					body, err := r.large(have[head:], length, keepAlive)
					return first, body, true, err
				}
			}
		}
		if err := r.fill(keepAlive); err != nil {
			return 0, nil, false, err
		}
	}
}

func (r *reader) have() []byte {
	if r.buf == nil {
		return nil
	}
	return r.buf[r.r:r.w]
}

// large reads a packet that does not fit into the buffer. Its buffer grows with what arrives, because the length may be a
// lie.
func (r *reader) large(begun []byte, length int, keepAlive time.Duration) ([]byte, error) {
	body := append(make([]byte, 0, min(length, 2*readSize)), begun...)
	r.release()
	for len(body) < length {
		if len(body) == cap(body) {
			body = slices.Grow(body, min(len(body), length-len(body)))
		}
		if err := r.setDeadline(keepAlive); err != nil {
			return nil, err
		}
		n, err := r.conn.transport.Read(body[len(body):min(cap(body), length)])
		body = body[:len(body)+n]
		if err != nil && len(body) < length {
			return nil, unexpected(err)
		}
	}
	return body, nil
}

func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

func (r *reader) setDeadline(keepAlive time.Duration) error {
	switch {
	case keepAlive == 0 && !r.bare: // greet has set its own
		return nil
	case keepAlive == 0:
		return r.conn.setReadDeadline(time.Time{}) // in place of that of wait
	}
	return r.conn.setReadDeadline(time.Now().Add(keepAlive))
}

// fill reads more bytes into the buffer.
func (r *reader) fill(keepAlive time.Duration) error {
	begun := r.w > r.r
	switch {
	case r.buf == nil:
	case !begun && r.bare:
		r.release()
	case !begun:
		r.r, r.w = 0, 0
	case r.w == readSize: // next has checked that the packet fits
		r.w = int32(copy(r.buf[:], r.buf[r.r:r.w]))
		r.r = 0
	}
	if r.buf == nil && r.bare {
		return r.wait(keepAlive)
	}
	if err := r.setDeadline(keepAlive); err != nil {
		return err
	}
	if r.buf == nil {
		r.buf = readBuffers.Get().(*[readSize]byte)
	}
	n, err := r.conn.transport.Read(r.buf[r.w:])
	if r.w += int32(n); n > 0 {
		return nil
	}
	if begun {
		err = unexpected(err)
	}
	return err
}

// wait waits for a packet without a buffer. After parkAfter, or at once if the socket is detached, it returns errSilent; after
// parkingCheck if the connection could not be parked the last time, because a write to the client waits.
func (r *reader) wait(keepAlive time.Duration) error {
	now := time.Now()
	if r.silent.IsZero() {
		r.silent = now
	}
	patience := parkAfter
	if r.refused {
		patience, r.refused = parkingCheck, false
	}
	until := now.Add(patience)
	if due := r.silent.Add(keepAlive); keepAlive > 0 && due.Before(until) {
		until = due
	}
	if err := r.conn.setReadDeadline(until); err != nil {
		return err
	}
	buf, n, err := r.conn.socket.tryRead()
	now = time.Now()
	switch {
	case timedOut(err) && !r.late(keepAlive, now):
		return errSilent
	case err != nil:
		return err
	}
	r.buf, r.r, r.w = buf, 0, int32(n)
	fast := now.Sub(r.silent) < parkAfter
	r.silent = time.Time{}
	switch {
	case !fast:
		r.fast = 0
	case r.fast < attachAfter:
		r.fast++
	default:
		return r.conn.socket.attach()
	}
	return nil
}

// late reports whether the client is silent for longer than its keep alive.
func (r *reader) late(keepAlive time.Duration, now time.Time) bool {
	return keepAlive > 0 && !r.silent.IsZero() && now.Sub(r.silent) >= keepAlive
}

// release gives the buffer back.
func (r *reader) release() {
	if r.buf != nil {
		readBuffers.Put(r.buf)
	}
	r.buf, r.r, r.w = nil, 0, 0
}
