package cri

import (
	"cmp"
	"context"
	"slices"

	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// The node remembers its latest events while the daemon runs. A client of GetContainerEvents that sends the header
// HeaderEvents gets them first. With HeaderEventsRecent, the stream then ends, without events of delegates. With
// HeaderEventsAll, it continues with new events. With HeaderEventsRecent the answer has the same header, so that the client
// can recognize a runtime that remembers nothing.
const (
	HeaderEvents       = "tripod-events"
	HeaderEventsRecent = "recent"
	HeaderEventsAll    = "all"
)

// CompilationEvent is the type of events about the compilation of an image's component. Only clients that send
// HeaderEvents get them, because the CRI has no events of images. The container's ID is the image's. There is no
// sandbox, and one status, with the image's name, the state (sandbox.CompilationState) as its reason, and the reason of a
// failure, or where the code comes from, as its message.
const CompilationEvent = runtimeapi.ContainerEventType(100)

// FallbackEvent is the type of events about containers that run slower than they could. Only clients that send
// HeaderEvents get them. There is one status, of the container, with the cause as its message.
const FallbackEvent = runtimeapi.ContainerEventType(101)

// RestoredEvent is the type of events about firewall rules of pods that something had removed and the node has made again.
// Only clients that send HeaderEvents get them. There is no sandbox, and one status, whose message names the rules.
const RestoredEvent = runtimeapi.ContainerEventType(102)

// GetContainerEvents streams every transition from now on, in order, until the client disconnects (KEP-3386). If the
// client falls behind, the stream ends, so that no event is lost unnoticed. The client must then subscribe again and
// list all pods again.
func (s *Server) GetContainerEvents(_ *runtimeapi.GetEventsRequest, stream runtimeapi.RuntimeService_GetContainerEventsServer) error {
	if wantsEvents(stream.Context(), HeaderEventsRecent) {
		return s.recentEvents(stream)
	}
	subscribe := s.node.Subscribe
	if wantsEvents(stream.Context(), HeaderEventsAll) {
		subscribe = s.node.SubscribeRecent
	}
	sub := subscribe()
	defer sub.Close()
	// The header tells the client that from now on the stream carries every event.
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	for {
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case event, ok := <-sub.Events():
			if !ok {
				return sub.Err()
			}
			if err := sendEvent(stream, event); err != nil {
				return err
			}
		}
	}
}

// recentEvents sends the events that the node remembers.
func (s *Server) recentEvents(stream runtimeapi.RuntimeService_GetContainerEventsServer) error {
	if err := stream.SendHeader(metadata.Pairs(HeaderEvents, HeaderEventsRecent)); err != nil {
		return err
	}
	for _, event := range s.node.RecentEvents() {
		if err := sendEvent(stream, event); err != nil {
			return err
		}
	}
	return nil
}

// sendEvent sends an event, unless it is one of an edge module or has a type that is not the CRI's, and the client did not
// ask for these.
func sendEvent(stream runtimeapi.RuntimeService_GetContainerEventsServer, event node.Event) error {
	own := event.Compilation != nil || event.Fallback != "" || event.Restored != ""
	switch {
	case own && !wantsEvents(stream.Context(), HeaderEventsRecent) && !wantsEvents(stream.Context(), HeaderEventsAll):
		return nil
	case event.Pod != nil && isModule(event.Pod) && !listsAll(stream.Context()):
		return nil
	case event.Compilation != nil:
		return stream.Send(compilationMessage(event))
	case event.Fallback != "":
		return stream.Send(fallbackMessage(event))
	case event.Restored != "":
		return stream.Send(&runtimeapi.ContainerEventResponse{
			ContainerEventType: RestoredEvent, CreatedAt: nano(event.At),
			ContainersStatuses: []*runtimeapi.ContainerStatus{{Message: event.Restored}},
		})
	}
	return stream.Send(eventMessage(event))
}

// wantsEvents reports whether the client sent the header HeaderEvents with this value.
func wantsEvents(ctx context.Context, value string) bool {
	md, _ := metadata.FromIncomingContext(ctx)
	return slices.Contains(md.Get(HeaderEvents), value)
}

func compilationMessage(e node.Event) *runtimeapi.ContainerEventResponse {
	c := e.Compilation
	return &runtimeapi.ContainerEventResponse{
		ContainerId: c.ImageID, ContainerEventType: CompilationEvent, CreatedAt: nano(e.At),
		ContainersStatuses: []*runtimeapi.ContainerStatus{{
			Id: c.ImageID, ImageRef: c.ImageID, Image: &runtimeapi.ImageSpec{Image: c.Image}, Reason: string(c.State),
			Message: cmp.Or(c.Reason, codeNote(c)),
		}},
	}
}

// codeNote says where code comes from, if the image brings code along.
func codeNote(c *sandbox.Compilation) string {
	switch {
	case c.LayerRefused != "":
		return "the code in the image is not used: " + c.LayerRefused
	case c.Key != "":
		return "the code is from the image, signed by " + c.Key
	}
	return ""
}

func fallbackMessage(e node.Event) *runtimeapi.ContainerEventResponse {
	m := eventMessage(e)
	m.ContainerEventType = FallbackEvent
	m.ContainersStatuses = slices.DeleteFunc(m.ContainersStatuses,
		func(s *runtimeapi.ContainerStatus) bool { return s.GetId() != e.ContainerID })
	for _, s := range m.ContainersStatuses {
		s.Message = e.Fallback
	}
	return m
}

// eventMessage describes an event and the statuses immediately after it.
func eventMessage(e node.Event) *runtimeapi.ContainerEventResponse {
	m := &runtimeapi.ContainerEventResponse{ContainerId: e.ContainerID, ContainerEventType: e.Type, CreatedAt: nano(e.At)}
	if e.Pod != nil {
		m.PodSandboxStatus, m.ContainersStatuses = sandboxStatus(e.Pod), containerStatuses(e.Pod)
	}
	return m
}
