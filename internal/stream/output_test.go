package attach_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/attach"
)

// TestBacklog: what waits is bounded, by bytes and by pieces.
func TestBacklog(t *testing.T) {
	for _, size := range []int{1, 8192} {
		c := attach.NewClient()
		n := 0
		for c.Put(attach.Packet{Data: make([]byte, size)}) {
			n++
		}
		select {
		case <-c.Cut():
		default:
			t.Error("not cut off")
		}
		if n != attach.Backlog/(size+attach.PacketCost) {
			t.Errorf("%d packets of %d bytes", n, size)
		}
	}
	if !errdefs.IsResourceExhausted(attach.ErrSlow) {
		t.Error(attach.ErrSlow)
	}
}

func TestDeliver(t *testing.T) {
	c := attach.NewClient()
	c.Put(attach.Packet{Data: []byte("one ")})
	c.Put(attach.Packet{Data: []byte("two"), Stderr: true})
	c.Put(attach.Packet{Data: []byte("three")})
	why := errors.New("the reason")
	c.End(why)
	c.Put(attach.Packet{Data: []byte("late")})
	var out, errOut bytes.Buffer
	if err := c.Deliver(&out, &errOut); err != why || out.String() != "one three" || errOut.String() != "two" {
		t.Errorf("%q and %q, %v", out.String(), errOut.String(), err)
	}
}
