package guestnode

import (
	"context"
	"encoding/json"
	"errors"
	"io"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
)

// watcher is a call of MethodEvents.
type watcher struct {
	wake chan struct{}
	// events are those to be sent.
	events []guestapi.Event
}

// report is the backend's sandbox.Sink.
func (n *Node) report(e sandbox.Event) {
	if e.ContainerID == "" {
		return // the pod's own init process; the containers that depend on it end, too
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for w := range n.watchers {
		w.events = append(w.events, guestapi.Event{Container: e.ContainerID, Status: e.Status})
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
}

// watch serves MethodEvents.
func (n *Node) watch(ctx context.Context, p *sandbox.Pod, out io.Writer) error {
	w := &watcher{wake: make(chan struct{}, 1)}
	n.mu.Lock()
	n.watchers[w] = true
	n.mu.Unlock()
	defer func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.watchers, w)
	}()
	send := json.NewEncoder(out)
	statuses, err := n.statuses(ctx, p)
	if err != nil {
		return err
	}
	for id, status := range statuses {
		if err := send.Encode(guestapi.Event{Container: id, Status: status}); err != nil {
			return err
		}
	}
	for {
		n.mu.Lock()
		events := w.events
		w.events = nil
		n.mu.Unlock()
		for _, e := range events {
			if err := errors.Join(fpEvent.Hit(ctx), send.Encode(e)); err != nil {
				return err
			}
		}
		select {
		case <-w.wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
