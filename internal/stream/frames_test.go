package stream

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"slices"
	"testing"

	"github.com/moby/spdystream/spdy"
)

// frames is a connection's beginning as the SPDY library writes it.
func frames(t testing.TB, list ...spdy.Frame) []byte {
	t.Helper()
	var b bytes.Buffer
	framer, err := spdy.NewFramer(&b, &b)
	if err != nil {
		t.Fatal(err)
	}
	for _, frame := range list {
		if err := framer.WriteFrame(frame); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

func open(id spdy.StreamId) spdy.Frame {
	return &spdy.SynStreamFrame{StreamId: id, Headers: http.Header{"streamType": {"stdout"}}}
}

// However the bytes are cut into portions, the frames are found.
func TestFrameReader(t *testing.T) {
	b := frames(t, open(1), &spdy.DataFrame{StreamId: 1}, &spdy.PingFrame{Id: 1}, &spdy.DataFrame{StreamId: 1, Data: make([]byte, 300)},
		&spdy.SynReplyFrame{StreamId: 3}, &spdy.GoAwayFrame{}, &spdy.RstStreamFrame{StreamId: 5, Status: spdy.Cancel}, open(7))
	want := []controlFrame{{spdySynStream, 1}, {spdySynReply, 3}, {spdyGoAway, 0}, {spdySynStream, 7}}
	for portion := 1; portion <= len(b); portion++ {
		var r frameReader
		var got []controlFrame
		for chunk := range slices.Chunk(b, portion) {
			for len(chunk) > 0 {
				frame, n := r.next(chunk)
				if frame.kind != 0 {
					got = append(got, frame)
				}
				chunk = chunk[n:]
			}
		}
		if !slices.Equal(got, want) || r.skip != 0 || r.have != 0 {
			t.Fatalf("in portions of %d: %v, want %v", portion, got, want)
		}
	}
}

// A stream too many does not pass, and all before it does.
func TestGuardLimit(t *testing.T) {
	within := frames(t, open(1), open(3))
	b := frames(t, open(1), open(3), open(5), open(7))
	for portion := 1; portion <= len(b); portion++ {
		g := newSPDYGuard(2)
		passed := 0
		var err error
		for chunk := range slices.Chunk(b, portion) {
			var n int
			n, err = g.received(chunk)
			passed += n
			if err != nil {
				break
			}
		}
		// With small portions a part of the third head has passed before it could be told what it is.
		if err == nil || passed < len(within) || passed >= len(within)+12 {
			t.Fatalf("in portions of %d: %d bytes passed, %v; the two streams have %d", portion, passed, err, len(within))
		}
	}
}

// A GOAWAY is the end: what stands before it passes.
func TestGuardGoAway(t *testing.T) {
	before := frames(t, open(1), &spdy.DataFrame{StreamId: 1, Data: []byte("bye")})
	b := append(bytes.Clone(before), frames(t, &spdy.GoAwayFrame{})...)
	if n, err := newSPDYGuard(0).received(b); n != len(before) || !errors.Is(err, errGoAway) {
		t.Errorf("%d bytes of %d passed, %v", n, len(before), err)
	}
}

// The end waits for the answers.
func TestGuardSettles(t *testing.T) {
	g := newSPDYGuard(0)
	never := make(chan struct{})
	g.settle(never)
	g.received(frames(t, open(1), open(3)))
	done := make(chan struct{})
	go func() {
		g.settle(never)
		close(done)
	}()
	g.sent(frames(t, &spdy.SynReplyFrame{StreamId: 1}))
	select {
	case <-done:
		t.Fatal("settled with a stream unanswered")
	default:
	}
	// One writer's bytes follow on another's, as on a connection.
	g.sent(frames(t, &spdy.RstStreamFrame{StreamId: 3, Status: spdy.Cancel}, &spdy.SynReplyFrame{StreamId: 3}))
	<-done
	over := make(chan struct{})
	close(over)
	g.received(frames(t, open(5)))
	g.settle(over)
}

// Who would reset a stream waits for its answer, whatever comes of others; and no longer than its session lasts.
func TestGuardAnswered(t *testing.T) {
	g := newSPDYGuard(0)
	g.answered(t.Context(), 1)
	g.received(frames(t, open(1), open(3)))
	done := make(chan struct{})
	go func() {
		g.answered(t.Context(), 3)
		close(done)
	}()
	g.sent(frames(t, &spdy.SynReplyFrame{StreamId: 1}))
	select {
	case <-done:
		t.Fatal("the answer of another stream was taken for its own")
	default:
	}
	g.sent(frames(t, &spdy.SynReplyFrame{StreamId: 3}))
	<-done
	g.received(frames(t, open(5)))
	over, cancel := context.WithCancel(t.Context())
	cancel()
	g.answered(over, 5)
}

// FuzzGuard: the guard takes any bytes, in any portions, in the same way.
func FuzzGuard(f *testing.F) {
	f.Add(frames(f, open(1), open(3)), 1)
	f.Add([]byte("GET / HTTP/1.1\r\n"), 5)
	f.Fuzz(func(t *testing.T, b []byte, portion int) {
		whole, parts := newSPDYGuard(0), newSPDYGuard(0)
		whole.received(b)
		for chunk := range slices.Chunk(b, max(1, min(portion, 100))) {
			if _, err := parts.received(chunk); err != nil {
				break
			}
		}
		if whole.opened != parts.opened || len(whole.unanswered) != len(parts.unanswered) {
			t.Errorf("%d streams at once, %d in portions", whole.opened, parts.opened)
		}
	})
}
