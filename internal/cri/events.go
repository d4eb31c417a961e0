package cri

import (
	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// GetContainerEvents streams every transition from now on, in order, until the client disconnects (KEP-3386). If the
// client falls behind, the stream ends, so that no event is lost unnoticed. The client must then subscribe again and
// list all pods again.
func (s *Server) GetContainerEvents(_ *runtimeapi.GetEventsRequest, stream runtimeapi.RuntimeService_GetContainerEventsServer) error {
	sub := s.node.Subscribe()
	defer sub.Close()
	all := listsAll(stream.Context())
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
			if !all && event.Pod != nil && isModule(event.Pod) {
				continue
			}
			if err := stream.Send(eventMessage(event)); err != nil {
				return err
			}
		}
	}
}

// eventMessage describes an event and the statuses immediately after it.
func eventMessage(e node.Event) *runtimeapi.ContainerEventResponse {
	m := &runtimeapi.ContainerEventResponse{ContainerId: e.ContainerID, ContainerEventType: e.Type, CreatedAt: nano(e.At)}
	if e.Pod != nil {
		m.PodSandboxStatus, m.ContainersStatuses = sandboxStatus(e.Pod), containerStatuses(e.Pod)
	}
	return m
}
