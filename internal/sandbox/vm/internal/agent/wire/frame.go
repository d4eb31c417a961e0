package wire

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"io"
)

const (
	// MaxData is the maximum number of bytes of a stream's data in one frame. Even the largest such frame fits into one
	// buffer of a virtio-serial port, which Linux makes no larger than 32 KiB.
	MaxData = 32000
	// MaxPayload is the maximum size of a payload in bytes. A program's arguments and environment are one payload.
	MaxPayload = 256 << 10

	headerSize = 8 + 4 + 1
	sumSize    = 4
	maxStuffed = MaxPayload + headerSize + sumSize + (MaxPayload+headerSize+sumSize)/cobsBlock + 1
)

// Kind is the kind of a frame.
type Kind byte

// The kinds. Their numbers are part of the protocol.
const (
	// KindHello begins a session. Sent by the host on stream 0; the payload is Hello.
	KindHello Kind = 1
	// KindWelcome answers each KindHello. Sent by the guest on stream 0; the payload is Welcome.
	KindWelcome Kind = 2
	// KindReady says that the guest has no session. Sent by the guest on stream 0 of session 0.
	KindReady Kind = 3
	// KindOpen opens a stream. Sent by the host; the payload is the operation (one byte) and its request.
	KindOpen Kind = 4
	// KindData carries data. The payload is the channel (one byte) and the data.
	KindData Kind = 5
	// KindWindow extends the peer's window. The payload is the channel (one byte) and the number of bytes (uint32).
	KindWindow Kind = 6
	// KindClose ends a channel's data. The payload is the channel (one byte).
	KindClose Kind = 7
	// KindResult ends a stream. Sent by the guest; the payload is Result.
	KindResult Kind = 8
	// KindCancel makes the guest end the stream's operation. Sent by the host, which then forgets the stream.
	KindCancel Kind = 9
	// KindResize sets a terminal's size. Sent by the host; the payload is columns and rows (uint16 each).
	KindResize Kind = 10
	// KindPing is sent by the host on stream 0. The guest answers with KindPong and the same payload.
	KindPing Kind = 11
	KindPong Kind = 12
)

type Frame struct {
	Session uint64
	Stream  uint32
	Kind    Kind
	// Payload refers to the Reader's memory. It is valid until the next call to Next.
	Payload []byte
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// AppendFrame appends an encoded frame to b. The payload is the concatenation of parts.
func AppendFrame(b []byte, session uint64, stream uint32, kind Kind, parts ...[]byte) []byte {
	size := headerSize + sumSize
	for _, part := range parts {
		size += len(part)
	}
	plain := make([]byte, 0, size)
	plain = binary.BigEndian.AppendUint64(plain, session)
	plain = binary.BigEndian.AppendUint32(plain, stream)
	plain = append(plain, byte(kind))
	for _, part := range parts {
		plain = append(plain, part...)
	}
	plain = binary.BigEndian.AppendUint32(plain, crc32.Checksum(plain, castagnoli))
	return append(stuff(b, plain), 0)
}

// parse decodes the bytes between two zeros in place. It returns false if they are not a valid frame.
func parse(b []byte) (Frame, bool) {
	plain, err := unstuff(b)
	if err != nil || len(plain) < headerSize+sumSize || len(plain) > headerSize+sumSize+MaxPayload {
		return Frame{}, false
	}
	body, sum := plain[:len(plain)-sumSize], plain[len(plain)-sumSize:]
	if crc32.Checksum(body, castagnoli) != binary.BigEndian.Uint32(sum) {
		return Frame{}, false
	}
	return Frame{
		Session: binary.BigEndian.Uint64(body),
		Stream:  binary.BigEndian.Uint32(body[8:]),
		Kind:    Kind(body[12]),
		Payload: body[headerSize:],
	}, true
}

// Reader reads frames from a byte stream. It skips all bytes that are not part of a valid frame.
type Reader struct {
	r io.Reader
	// buf[start:end] has been read, but not yet consumed. buf[start:start+seen] is known to contain no 0.
	buf              []byte
	start, end, seen int
	skipping         bool // the input up to the next 0 is too long for a frame
}

// NewReader returns a Reader that reads from r.
func NewReader(r io.Reader) *Reader { return &Reader{r: r, buf: make([]byte, 16<<10)} }

// Next returns the next valid frame, or the byte stream's error, including io.EOF. After an error, Next can be called
// again. It then discards any incomplete frame.
func (r *Reader) Next() (Frame, error) {
	for {
		piece, ok := r.cut()
		if !ok {
			if err := r.fill(); err != nil {
				r.start, r.end, r.seen, r.skipping = 0, 0, 0, false
				return Frame{}, err
			}
			continue
		}
		if len(piece) == 0 {
			continue // a 0 before a frame ends an incomplete frame
		}
		if f, ok := parse(piece); ok {
			return f, nil
		}
	}
}

// cut returns the bytes before the next 0, or nil if they are too many for a frame. It returns false if no 0 has been
// read yet.
func (r *Reader) cut() ([]byte, bool) {
	zero := bytes.IndexByte(r.buf[r.start+r.seen:r.end], 0)
	if zero < 0 {
		r.seen = r.end - r.start
		if r.seen > maxStuffed {
			r.start, r.end, r.seen, r.skipping = 0, 0, 0, true
		}
		return nil, false
	}
	piece := r.buf[r.start : r.start+r.seen+zero]
	r.start += r.seen + zero + 1
	r.seen = 0
	if r.skipping {
		r.skipping = false
		return nil, true
	}
	return piece, true
}

// fill reads once into the buffer, which grows as needed.
func (r *Reader) fill() error {
	if r.start > 0 {
		r.end = copy(r.buf, r.buf[r.start:r.end])
		r.start = 0
	}
	if r.end == len(r.buf) {
		r.buf = append(r.buf, make([]byte, len(r.buf))...)
	}
	n, err := r.r.Read(r.buf[r.end:])
	r.end += n
	if n > 0 {
		return nil
	}
	if err == nil {
		err = io.ErrNoProgress
	}
	return err
}
