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

// frames returns the bytes that the SPDY library writes for the frames on a new connection.
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

// TestFrameReader checks that the frames are found in portions of any size.
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
			t.Fatalf("frames found in portions of %d bytes = %v, want %v", portion, got, want)
		}
	}
}

// TestGuardLimit checks that a stream beyond the limit is rejected, and that everything before it passes.
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
		// In small portions, a part of the third header passes before its type is known.
		if err == nil || passed < len(within) || passed >= len(within)+12 {
			t.Fatalf("in portions of %d bytes, %d bytes passed, %v, want an error after the %d bytes of two streams", portion, passed, err,
				len(within))
		}
	}
}

// TestGuardGoAway checks that received ends with errGoAway at a GOAWAY, and that everything before it passes.
func TestGuardGoAway(t *testing.T) {
	before := frames(t, open(1), &spdy.DataFrame{StreamId: 1, Data: []byte("bye")})
	b := append(bytes.Clone(before), frames(t, &spdy.GoAwayFrame{})...)
	if n, err := newSPDYGuard(0).received(b); n != len(before) || !errors.Is(err, errGoAway) {
		t.Errorf("received = %d, %v, want %d, errGoAway", n, err, len(before))
	}
}

// TestGuardSettles checks that settle waits for the answers to all streams.
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
		t.Fatal("settle returned before all streams were answered")
	default:
	}
	// As on a connection, the frames share one write.
	g.sent(frames(t, &spdy.RstStreamFrame{StreamId: 3, Status: spdy.Cancel}, &spdy.SynReplyFrame{StreamId: 3}))
	<-done
	over := make(chan struct{})
	close(over)
	g.received(frames(t, open(5)))
	g.settle(over)
}

// TestGuardAnswered checks that answered waits for the answer to its own stream, but not longer than its context.
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
		t.Fatal("answered returned after the answer to another stream")
	default:
	}
	g.sent(frames(t, &spdy.SynReplyFrame{StreamId: 3}))
	<-done
	g.received(frames(t, open(5)))
	over, cancel := context.WithCancel(t.Context())
	cancel()
	g.answered(over, 5)
}

// FuzzGuard checks that received finds the same streams in any bytes, whatever the portions.
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
			t.Errorf("streams opened in portions = %d, %d unanswered; in one piece %d, %d unanswered",
				parts.opened, len(parts.unanswered), whole.opened, len(whole.unanswered))
		}
	})
}
