package wire

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"io"
)

// Limits of a frame.
const (
	// MaxData is how many bytes of a stream a frame carries: the frame then fits into one buffer of a virtio-serial port,
	// which Linux makes 32 KiB at most.
	MaxData = 32000
	// MaxPayload is the longest payload in bytes: the arguments and environment of a program are one.
	MaxPayload = 256 << 10

	headerSize = 8 + 4 + 1
	sumSize    = 4
	maxStuffed = MaxPayload + headerSize + sumSize + (MaxPayload+headerSize+sumSize)/cobsBlock + 1
)

// Kind is what a frame is.
type Kind byte

// The kinds. Their numbers are the protocol.
const (
	// KindHello (host, stream 0; payload Hello) begins a session.
	KindHello Kind = 1
	// KindWelcome (guest, stream 0; payload Welcome) answers it, each time.
	KindWelcome Kind = 2
	// KindReady (guest, session 0, stream 0) says that no session is there.
	KindReady Kind = 3
	// KindOpen (host; payload an operation's byte and its request) opens a stream.
	KindOpen Kind = 4
	// KindData (payload: a channel's byte and data).
	KindData Kind = 5
	// KindWindow (payload: a channel's byte and a uint32) lets so many more bytes come.
	KindWindow Kind = 6
	// KindClose (payload: a channel's byte): no more data comes on the channel.
	KindClose Kind = 7
	// KindResult (guest; payload Result) ends a stream.
	KindResult Kind = 8
	// KindCancel (host): the host has forgotten the stream; what it did is to be ended.
	KindCancel Kind = 9
	// KindResize (host; payload: columns and rows, uint16 each) sets a terminal's size.
	KindResize Kind = 10
	// KindPing (host, stream 0) and KindPong (guest, same payload).
	KindPing Kind = 11
	KindPong Kind = 12
)

// Frame is one frame.
type Frame struct {
	Session uint64
	Stream  uint32
	Kind    Kind
	// Payload refers to the Reader's memory, until its next Next.
	Payload []byte
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// AppendFrame appends the frame as it is sent to b. The payload is the concatenation of parts.
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

// parse reads what stands between two zeros, using its memory.
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

// Reader finds the frames in a byte stream, whatever stands between them.
type Reader struct {
	r io.Reader
	// buf[start:end] is read and not yet used; of it, the first seen bytes hold no 0.
	buf              []byte
	start, end, seen int
	skipping         bool // what is read is too long for a frame, or its beginning was thrown away
}

// NewReader reads frames from r.
func NewReader(r io.Reader) *Reader { return &Reader{r: r, buf: make([]byte, 16<<10)} }

// Next returns the next frame that is whole. The error is the stream's, io.EOF included; reading may go on after it, with
// what had come of a frame forgotten.
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
			continue // zeros before a frame separate it from what was there
		}
		if f, ok := parse(piece); ok {
			return f, nil
		}
	}
}

// cut returns what precedes the next 0, if that has arrived, and nothing of what is skipped.
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

// fill reads once. The buffer grows as needed.
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
