package manager

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// TestDroppedExitIsSentAgain: an exit that the client had to drop while the broker was away is reported once the broker
// is back.
func TestDroppedExitIsSentAgain(t *testing.T) {
	r := exitWhileAway(t)
	r.awaitQueuedExit(t)
	r.client().forget()
	r.client().connect()
	if got := r.exitedOf(runtimeA, "m", 1)["status"].(map[string]any); got["code"] != 4.0 {
		t.Errorf("the exit has the status %v, want code 4", got)
	}
	r.m.exits.waitEmpty(t)
}

// TestExitBehindFullWindow: an exit stays in the record while it is in the client's queue, however long ago the client got
// it. Otherwise it would be lost if the daemon were killed, or the queue dropped, soon after the broker is back.
func TestExitBehindFullWindow(t *testing.T) {
	r := exitWhileAway(t)
	r.awaitQueuedExit(t)
	r.mu.Lock()
	r.client().full = true
	r.mu.Unlock()
	r.client().connect()
	if left := r.m.exits.settle(r.m); left != 1 || r.recordedExits(t) != 1 {
		t.Fatalf("%d exits are kept and %d in the record, want 1", left, r.recordedExits(t))
	}
	r.client().forget()
	if got := r.exitedOf(runtimeA, "m", 1)["status"].(map[string]any); got["code"] != 4.0 {
		t.Errorf("the exit has the status %v, want code 4", got)
	}
	r.m.exits.waitEmpty(t)
}

func (r *rig) recordedExits(t *testing.T) (n int) {
	t.Helper()
	if err := r.m.store.All(kindExit, func(string, []byte) error { n++; return nil }); err != nil {
		t.Fatal(err)
	}
	return n
}

// awaitQueuedExit waits until the client has the exit of exitWhileAway in its queue, and the manager knows that.
func (r *rig) awaitQueuedExit(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	queued := func() bool {
		c := r.client()
		c.bus.mu.Lock()
		has := slices.ContainsFunc(c.queued, isExit("m"))
		c.bus.mu.Unlock()
		r.m.exits.mu.Lock()
		defer r.m.exits.mu.Unlock()
		for _, e := range r.m.exits.all {
			has = has && e.queued
		}
		return has
	}
	if err := poll(ctx, queued); err != nil {
		t.Fatal(err)
	}
}

// TestExitBehindSlowMessage: an exit stays in the record while it waits behind a message that a slow broker does not
// take. Otherwise a kill would lose the exit.
func TestExitBehindSlowMessage(t *testing.T) {
	stalled := make(chan struct{})
	proceed := sync.OnceFunc(func() { close(stalled) })
	r := newRig(t, nil, func(b *bus) { b.stalled = stalled })
	t.Cleanup(proceed)
	r.order(runtimeA, wire.ActionCreate, moduleData("m"))
	r.a.find(t, true, 0, wire.Create, 1)
	r.a.open(t, 0, 0, channel.Write, "slow")
	r.a.tell(t, false, 0, 0, "text")
	r.a.tell(t, true, 0, wire.Exited, `{"status": {"code": 4, "reason": "exited"}}`)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	recorded := func() bool { return r.recordedExits(t) == 1 }
	if err := poll(ctx, recorded); err != nil {
		t.Fatal("the exit is not recorded:", err)
	}
	<-time.After(3 * exitsPoll)
	if n := r.count(isExit("m")); n != 0 || !recorded() {
		t.Errorf("the exit was sent %d times and is in the record: %v; want 0 times and true", n, recorded())
	}
	proceed()
	if got := r.exitedOf(runtimeA, "m", 1)["status"].(map[string]any); got["code"] != 4.0 {
		t.Errorf("the exit has the status %v, want code 4", got)
	}
	r.m.exits.waitEmpty(t)
	if n := r.count(isExit("m")); n != 1 {
		t.Errorf("the exit was sent %d times, want 1", n)
	}
}

// forget drops the client's queue.
func (c *busClient) forget() {
	c.bus.mu.Lock()
	defer c.bus.mu.Unlock()
	c.dropped += uint64(len(c.queued))
	c.settle(false)
}

func (x *exits) waitEmpty(t testing.TB) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for time.Now().Before(deadline) {
		x.mu.Lock()
		n := len(x.all)
		x.mu.Unlock()
		if n == 0 {
			return
		}
		<-time.After(10 * time.Millisecond)
	}
	t.Error("exits are kept although they are acknowledged")
}
