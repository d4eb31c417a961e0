package cri

import (
	"io"
	"strings"
	"testing"

	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
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

// TestRememberedEventsWithADelegate: the stream ends although the delegate's events do not.
func TestRememberedEventsWithADelegate(t *testing.T) {
	p := openPair(t)
	own := p.front.pod(t, "own")
	p.run(t, "theirs")
	s, err := p.front.GetContainerEvents(metadata.AppendToOutgoingContext(t.Context(), HeaderEvents, HeaderEventsRecent), &runtimeapi.GetEventsRequest{})
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
