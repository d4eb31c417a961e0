package node

import (
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestN10SubscriberThatNeverReadsIsDropped: its buffer is bounded, and other subscribers lose nothing.
func TestN10SubscriberThatNeverReadsIsDropped(t *testing.T) {
	h := newHub()
	idle, busy := h.subscribe(false), h.subscribe(false)
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
	if late := h.subscribe(false); !errdefs.IsUnavailable(late.Err()) {
		t.Errorf("Err of a subscription to a closed node = %v, want unavailable", late.Err())
	}
}

// TestHubRemembersRecentEvents: the latest ones, in order, and no event between them and the new ones is missing.
func TestHubRemembersRecentEvents(t *testing.T) {
	h := newHub()
	up := &Pod{ID: "p", State: Initiated}
	for range recentEvents + 10 {
		h.emit(nil, up) // created and started
	}
	h.emit(up, nil)
	if got := h.latest(); len(got) != recentEvents || got[recentEvents-1].Type != runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT {
		t.Errorf("got %d events, the last %v; want %d and deleted", len(got), got[len(got)-1], recentEvents)
	}
	s := h.subscribe(true)
	h.emit(nil, up)
	s.Close()
	n, last := 0, Event{}
	for e := range s.Events() {
		if e.At.Before(last.At) {
			t.Errorf("event %d is older than the one before", n)
		}
		n, last = n+1, e
	}
	if n != recentEvents+2 || last.Type != runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT {
		t.Errorf("got %d events, the last %v; want %d and started", n, last, recentEvents+2)
	}
}
