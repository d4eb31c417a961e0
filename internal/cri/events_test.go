package cri

import (
	"context"
	"io"
	"strings"
	"testing"

	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// TestRememberedEvents: a client that asks gets the earlier events, and only then the new ones or the end of the stream. A
// kubelet, which does not ask, gets only new ones.
func TestRememberedEvents(t *testing.T) {
	d := open(t)
	old := d.pod(t, "old")
	c := d.running(t, old, "c")
	subscribe := func(header string) runtimeapi.RuntimeService_GetContainerEventsClient {
		t.Helper()
		ctx := t.Context()
		if header != "" {
			ctx = metadata.AppendToOutgoingContext(ctx, HeaderEvents, header)
		}
		s, err := d.GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
		must(t, err)
		answer, err := s.Header()
		must(t, err)
		wantEqual(t, "answer's header after "+header, len(answer.Get(HeaderEvents)) == 1, header == HeaderEventsRecent)
		return s
	}
	recent, all, kubelet := subscribe(HeaderEventsRecent), subscribe(HeaderEventsAll), subscribe("")
	next := d.pod(t, "next")
	want := []string{old, old, c, c}
	for _, s := range []runtimeapi.RuntimeService_GetContainerEventsClient{recent, all} {
		for i, id := range want {
			e, err := s.Recv()
			must(t, err)
			if e.GetContainerId() != id || e.GetPodSandboxStatus().GetMetadata().GetName() != "old" {
				t.Errorf("remembered event %d: got %s of %v, want one of %s", i, e.GetContainerId(), e.GetPodSandboxStatus().GetMetadata(), id)
			}
		}
	}
	if e, err := recent.Recv(); err != io.EOF {
		t.Errorf("after the remembered events: got %v, error %v; want io.EOF", e, err)
	}
	for _, s := range []runtimeapi.RuntimeService_GetContainerEventsClient{all, kubelet} {
		e, err := s.Recv()
		must(t, err)
		wantEqual(t, "the first new event is of", e.GetContainerId(), next)
	}
}

// eventStream is a stream to a client with a header.
type eventStream struct {
	runtimeapi.RuntimeService_GetContainerEventsServer
	ctx  context.Context
	sent []*runtimeapi.ContainerEventResponse
}

func (s *eventStream) Context() context.Context { return s.ctx }
func (s *eventStream) Send(e *runtimeapi.ContainerEventResponse) error {
	s.sent = append(s.sent, e)
	return nil
}

// TestFallbackEvent: a client that asks for the node's own events gets the reason with the container it is about. A kubelet
// gets no event of a type that it does not know.
func TestFallbackEvent(t *testing.T) {
	pod := &node.Pod{ID: "p", Containers: []*node.Container{{ID: "a", State: node.Running}, {ID: "b", State: node.Running}}}
	for _, c := range pod.Containers {
		c.Config = &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: c.ID}}
	}
	event := node.Event{PodID: "p", ContainerID: "b", Pod: pod, Fallback: "too slow"}
	for header, want := range map[string]int{"": 0, HeaderEventsRecent: 1, HeaderEventsAll: 1} {
		s := &eventStream{ctx: metadata.NewIncomingContext(t.Context(), metadata.Pairs(HeaderEvents, header))}
		must(t, sendEvent(s, event))
		wantEqual(t, "events with the header "+header, len(s.sent), want)
		for _, m := range s.sent {
			statuses := m.GetContainersStatuses()
			if m.GetContainerEventType() != FallbackEvent || len(statuses) != 1 || statuses[0].GetId() != "b" ||
				statuses[0].GetMessage() != "too slow" {
				t.Errorf("event: got %v, want the fallback of b", m)
			}
		}
	}
}

// TestRestoredEvent: only a client that asks for the node's own events gets those about the firewall.
func TestRestoredEvent(t *testing.T) {
	for header, want := range map[string]int{"": 0, HeaderEventsRecent: 1, HeaderEventsAll: 1} {
		s := &eventStream{ctx: metadata.NewIncomingContext(t.Context(), metadata.Pairs(HeaderEvents, header))}
		must(t, sendEvent(s, node.Event{Restored: "host ports of pod p"}))
		wantEqual(t, "events with the header "+header, len(s.sent), want)
		for _, m := range s.sent {
			if m.GetContainerEventType() != RestoredEvent || m.GetContainersStatuses()[0].GetMessage() != "host ports of pod p" {
				t.Errorf("event: got %v, want the restored rules", m)
			}
		}
	}
}

// TestRememberedEventsWithADelegate: the stream ends although the delegate's events do not.
func TestRememberedEventsWithADelegate(t *testing.T) {
	p := openPair(t)
	own := p.front.pod(t, "own")
	p.run(t, "theirs")
	s, err := p.front.GetContainerEvents(metadata.AppendToOutgoingContext(t.Context(), HeaderEvents, HeaderEventsRecent),
		&runtimeapi.GetEventsRequest{})
	must(t, err)
	var got []string
	for {
		e, err := s.Recv()
		if err == io.EOF {
			break
		}
		must(t, err)
		got = append(got, e.GetContainerId())
	}
	wantEqual(t, "events", strings.Join(got, " "), own+" "+own)
}
