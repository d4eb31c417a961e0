package cri

import (
	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// GetContainerEvents sends every transition from the call on, in order, until the client goes away (KEP-3386). A
// client that does not keep up loses the stream, not single events: it lists again and asks anew.
func (s *Server) GetContainerEvents(_ *runtimeapi.GetEventsRequest, stream runtimeapi.RuntimeService_GetContainerEventsServer) error {
	sub := s.node.Subscribe()
	defer sub.Close()
	all := listsAll(stream.Context())
	// The header tells the client that what happens from now on will reach it.
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
			if !all && event.Pod != nil && ofEdge(event.Pod) {
				continue
			}
			if err := stream.Send(eventMessage(event)); err != nil {
				return err
			}
		}
	}
}

// eventMessage is an event with the statuses that held right after it.
func eventMessage(e node.Event) *runtimeapi.ContainerEventResponse {
	m := &runtimeapi.ContainerEventResponse{ContainerId: e.ContainerID, ContainerEventType: e.Type, CreatedAt: nano(e.At)}
	if e.Pod != nil {
		m.PodSandboxStatus, m.ContainersStatuses = sandboxStatus(e.Pod), containerStatuses(e.Pod)
	}
	return m
}
