package cri

import (
	"context"
	"math"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// StopContainer asks the container to end and kills it after the timeout. An unknown ID counts as stopped.
func (s *Server) StopContainer(ctx context.Context, req *runtimeapi.StopContainerRequest) (*runtimeapi.StopContainerResponse, error) {
	if req.GetContainerId() == "" {
		return nil, required("container_id")
	}
	grace, err := seconds("timeout", req.GetTimeout())
	if err != nil {
		return nil, err
	}
	if err := s.node.StopContainer(ctx, req.GetContainerId(), grace); err != nil {
		return nil, err
	}
	return &runtimeapi.StopContainerResponse{}, nil
}

// seconds converts the API's seconds to a Duration. A number too large for a Duration becomes the longest Duration.
func seconds(field string, n int64) (time.Duration, error) {
	switch {
	case n < 0:
		return 0, invalid(field, "must not be negative, is %d", n)
	case n > math.MaxInt64/int64(time.Second):
		return math.MaxInt64, nil
	}
	return time.Duration(n) * time.Second, nil
}
