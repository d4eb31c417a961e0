package node

import (
	"testing"

	"github.com/containerd/errdefs"
)

// TestN10SubscriberThatNeverReadsIsDropped: its buffer is bounded, and other subscribers lose nothing.
func TestN10SubscriberThatNeverReadsIsDropped(t *testing.T) {
	h := newHub()
	idle, busy := h.subscribe(), h.subscribe()
	received := make(chan int)
	go func() {
		n := 0
		for range busy.Events() {
			n++
		}
		received <- n
	}()
	up, down := &Pod{ID: "p", State: Initiated}, &Pod{ID: "p", State: Killed}
	sent := 0
	for ; idle.Err() == nil; sent++ {
		h.emit(up, down)
		if sent > 2*eventBuffer {
			t.Fatal("the subscription that is never read did not end")
		}
		if len(busy.events) > eventBuffer/2 { // let the reader keep up
			for len(busy.events) > 0 {
			}
		}
	}
	if !errdefs.IsResourceExhausted(idle.Err()) {
		t.Errorf("Err of the subscription that is never read = %v, want resource exhausted", idle.Err())
	}
	busy.Close()
	if n := <-received; n != sent || busy.Err() != nil {
		t.Errorf("the reader got %d of %d events, %v", n, sent, busy.Err())
	}
	h.close()
	if late := h.subscribe(); !errdefs.IsUnavailable(late.Err()) {
		t.Errorf("Err of a subscription to a closed node = %v, want unavailable", late.Err())
	}
}
