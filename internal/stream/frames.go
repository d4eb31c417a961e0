package stream

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

// spdyGuard works around three faults of the SPDY library (moby/spdystream, used by k8s.io/streaming):
//
//   - The session's handler accepts only as many streams as the client requested. For each further stream that the
//     client opens, a goroutine waits forever to hand the stream over.
//   - The library answers a stream (SYN_REPLY) before it writes to the stream. If the client goes away in between, or
//     has sent GOAWAY, the answer fails, and every write to the stream waits for the answer forever.
//   - The library hands a stream over before it answers the stream. If the handler resets the stream in between, the
//     client gets no answer, and so does not learn the reason for the reset.
//
// spdyGuard follows the frames of a connection in both directions. It rejects streams beyond the limit, and delays the
// end of the client's input (EOF or GOAWAY) until all streams are answered. Writes to a client that is gone succeed. A
// handler must call answered before it resets a stream.
type spdyGuard struct {
	// max limits the number of streams that the client may open; 0 means no limit.
	max int

	mu         sync.Mutex
	in, out    frameReader
	opened     int
	unanswered map[uint32]chan struct{} // by stream ID; closed when the stream is answered
}

// settleTime limits how long the end of the client's input is delayed. A limit is needed because refused streams are
// never answered.
const settleTime = 3 * time.Second

func newSPDYGuard(max int) *spdyGuard {
	return &spdyGuard{max: max, unanswered: map[uint32]chan struct{}{}}
}

// received inspects bytes from the client and returns how many of them can be passed on. If there is no error, all of
// them can be passed on.
func (g *spdyGuard) received(p []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for done := 0; done < len(p); {
		frame, n := g.in.next(p[done:])
		switch frame.kind {
		case spdySynStream:
			if g.opened++; g.max > 0 && g.opened > g.max {
				return done, fmt.Errorf("it opened more than the %d streams of its request", g.max)
			}
			if g.unanswered[frame.stream] == nil { // a client that wrongly repeats an ID gets one answer
				g.unanswered[frame.stream] = make(chan struct{})
			}
		case spdyGoAway:
			return done, errGoAway
		}
		done += n
	}
	return len(p), nil
}

// sent inspects bytes that were written to the client.
func (g *spdyGuard) sent(p []byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for done := 0; done < len(p); {
		frame, n := g.out.next(p[done:])
		if frame.kind == spdySynReply { // a reset is not an answer, and may come before the answer
			if answer := g.unanswered[frame.stream]; answer != nil {
				close(answer)
				delete(g.unanswered, frame.stream)
			}
		}
		done += n
	}
}

// answered waits until the stream is answered, or ctx ends.
func (g *spdyGuard) answered(ctx context.Context, stream uint32) {
	g.mu.Lock()
	answer := g.unanswered[stream]
	g.mu.Unlock()
	if answer == nil {
		return
	}
	select {
	case <-answer:
	case <-ctx.Done():
	}
}

// settle waits until every stream is answered, done is closed, or settleTime has passed.
func (g *spdyGuard) settle(done <-chan struct{}) {
	g.mu.Lock()
	answers := slices.Collect(maps.Values(g.unanswered))
	g.mu.Unlock()
	timeout := time.After(settleTime)
	for _, answer := range answers {
		select {
		case <-answer:
		case <-done:
			return
		case <-timeout:
			return
		}
	}
}

var errGoAway = errors.New("it sent GOAWAY")

// Types of SPDY control frames (SPDY/3.1, 2.6).
const (
	spdySynStream = 1
	spdySynReply  = 2
	spdyGoAway    = 7
)

// frameReader finds frames in a stream of bytes. A frame (SPDY/3.1, 2.2) has a header of eight bytes. In a control
// frame, bytes 2 and 3 hold the type. In every frame, bytes 5 to 7 hold the length of the body. In the control frames
// above, the body begins with a stream ID.
type frameReader struct {
	head [longHead]byte
	have int    // bytes of head already read
	skip uint32 // bytes of the frame's body not yet read
}

// controlFrame is a frame found by frameReader. For any frame other than the control frames above, kind is 0.
type controlFrame struct {
	kind   uint16
	stream uint32
}

// next reads bytes from p, up to the end of p or the end of a frame's header, and returns the number of bytes read. If
// these bytes complete a header, it also returns the frame.
func (r *frameReader) next(p []byte) (frame controlFrame, n int) {
	if r.skip > 0 {
		n = int(min(r.skip, uint32(len(p))))
		r.skip -= uint32(n)
		return frame, n
	}
	for r.have < r.headLen() {
		m := copy(r.head[r.have:r.headLen()], p[n:])
		if m == 0 {
			return frame, n
		}
		r.have += m
		n += m
	}
	r.skip = r.length() + shortHead - uint32(r.have)
	if r.have == longHead {
		frame = controlFrame{r.kind(), binary.BigEndian.Uint32(r.head[shortHead:]) & 0x7fffffff}
	}
	r.have = 0
	return frame, n
}

// Header lengths: without the stream ID, and with it.
const (
	shortHead = 8
	longHead  = 12
)

// headLen returns the length of the header. As long as the type and the length are not read yet, it returns shortHead.
func (r *frameReader) headLen() int {
	if r.have >= shortHead && r.kind() != 0 && r.length() >= longHead-shortHead {
		return longHead
	}
	return shortHead
}

func (r *frameReader) length() uint32 { return binary.BigEndian.Uint32(r.head[4:]) & 0xffffff }

func (r *frameReader) kind() uint16 {
	const control = 0x80
	kind := binary.BigEndian.Uint16(r.head[2:])
	if r.head[0]&control != 0 && (kind == spdySynStream || kind == spdySynReply || kind == spdyGoAway) {
		return kind
	}
	return 0
}
