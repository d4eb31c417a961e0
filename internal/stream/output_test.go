package stream_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/stream"
)

// TestBacklog: what waits is bounded, by bytes and by pieces.
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
			t.Error("not cut off")
		}
		if n != stream.MaxBacklog/(size+stream.PacketCost) {
			t.Errorf("%d packets of %d bytes", n, size)
		}
	}
	if !errdefs.IsResourceExhausted(stream.ErrSlowClient) {
		t.Error(stream.ErrSlowClient)
	}
}

func TestDeliver(t *testing.T) {
	c := stream.NewOutputQueue()
	c.Put(stream.Packet{Data: []byte("one ")})
	c.Put(stream.Packet{Data: []byte("two"), Stderr: true})
	c.Put(stream.Packet{Data: []byte("three")})
	why := errors.New("the reason")
	c.End(why)
	c.Put(stream.Packet{Data: []byte("late")})
	var out, errOut bytes.Buffer
	if err := c.Deliver(&out, &errOut); err != why || out.String() != "one three" || errOut.String() != "two" {
		t.Errorf("%q and %q, %v", out.String(), errOut.String(), err)
	}
}
