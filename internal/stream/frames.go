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

// The SPDY library (moby/spdystream, used by k8s.io/streaming) has two ways of being left waiting for ever by its client,
// and one of confusing it:
//
//   - Of the streams that a client opens, the session's handler takes as many as the request has. Each more leaves a
//     goroutine behind that wants to hand it over.
//   - A stream is answered before it is written to. If the client goes in between, the answer fails, and whoever
//     writes to the stream waits for the answer. After a client's GOAWAY, too, nothing can be written.
//   - A stream is handed over before it is answered. If it is reset in between, the client learns of no stream, and not
//     of the reason that goes with the reset.
//
// spdyGuard follows the frames of a connection in both directions, lets no stream beyond a limit through, and holds
// the news of the client's end back until all streams are answered. A GOAWAY, by which clients take their leave, is such
// an end. What is written to a client that is gone succeeds. Who may reset a stream waits for its answer.
type spdyGuard struct {
	// max is how many streams the client may open, 0 for any number.
	max int

	mu         sync.Mutex
	in, out    frameReader
	opened     int
	unanswered map[uint32]chan struct{} // closed with the stream's answer
}

// settleTime is how long at most the client's end is held back. Streams that were refused are never answered.
const settleTime = 3 * time.Second

func newSPDYGuard(max int) *spdyGuard {
	return &spdyGuard{max: max, unanswered: map[uint32]chan struct{}{}}
}

// received looks at bytes from the client and returns how many of them may pass: all, unless there is an error.
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
			if g.unanswered[frame.stream] == nil { // a number may not come twice; if it does, one answer is for both
				g.unanswered[frame.stream] = make(chan struct{})
			}
		case spdyGoAway:
			return done, errGoAway
		}
		done += n
	}
	return len(p), nil
}

// sent looks at bytes to the client.
func (g *spdyGuard) sent(p []byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for done := 0; done < len(p); {
		frame, n := g.out.next(p[done:])
		if frame.kind == spdySynReply { // a reset is none: it may come while the answer is under way
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

// settle waits until every stream is answered, over is closed, or settleTime has passed.
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

var errGoAway = errors.New("it said so (GOAWAY)")

// Kinds of SPDY control frame (SPDY/3.1, 2.6).
const (
	spdySynStream = 1
	spdySynReply  = 2
	spdyGoAway    = 7
)

// frameReader finds the frames in a stream of bytes. A frame (SPDY/3.1, 2.2) has a head of eight bytes, with a control
// bit, the kind in 15 bits and, after four bytes, flags and the length of its body in 24 bits. The body of the control
// frames above begins with the stream's number.
type frameReader struct {
	head [longHead]byte
	have int    // bytes of head that are there
	skip uint32 // bytes of the frame's body to come
}

// controlFrame is what frameReader reports about a frame; kind is 0 for any other kind.
type controlFrame struct {
	kind   uint16
	stream uint32
}

// next takes bytes from p, up to the end of p or of a frame's head, and tells how many, and of what frame the head is.
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

// A head is read with the first four bytes of the body where these are wanted.
const (
	shortHead = 8
	longHead  = 12
)

// headLen is how much of a head to read, as far as can be told from what is there.
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
