package stream_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/stream"
)

// TestBacklog checks that the queue is limited both for large and for small packets.
func TestBacklog(t *testing.T) {
	for _, size := range []int{1, 8192} {
		c := stream.NewOutputQueue()
		n := 0
		for c.Put(stream.Packet{Data: make([]byte, size)}) {
			n++
		}
		select {
		case <-c.Cut():
		default:
			t.Error("Cut is not closed after Put returned false")
		}
		if want := stream.MaxBacklog / (size + stream.PacketCost); n != want {
			t.Errorf("the queue took %d packets of %d bytes, want %d", n, size, want)
		}
	}
	if !errdefs.IsResourceExhausted(stream.ErrSlowClient) {
		t.Errorf("ErrSlowClient = %v, want resource exhausted", stream.ErrSlowClient)
	}
}

func TestDeliver(t *testing.T) {
	c := stream.NewOutputQueue()
	c.Put(stream.Packet{Data: []byte("one ")})
	c.Put(stream.Packet{Data: []byte("two"), Stderr: true})
	c.Put(stream.Packet{Data: []byte("three")})
	want := errors.New("the reason")
	c.End(want)
	c.Put(stream.Packet{Data: []byte("late")})
	var out, errOut bytes.Buffer
	if err := c.Deliver(&out, &errOut); err != want || out.String() != "one three" || errOut.String() != "two" {
		t.Errorf("Deliver wrote %q and %q and returned %v, want \"one three\", \"two\" and %v", out.String(), errOut.String(), err, want)
	}
}
