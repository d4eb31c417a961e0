package cri

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/stream"
)

// ExecSync runs a command in the container and returns its output and exit code. A non-zero exit code is not an error.
func (s *Server) ExecSync(ctx context.Context, req *runtimeapi.ExecSyncRequest) (*runtimeapi.ExecSyncResponse, error) {
	if err := validateCommand(req.GetContainerId(), req.GetCmd()); err != nil {
		return nil, err
	}
	timeout, err := seconds("timeout", req.GetTimeout())
	if err != nil {
		return nil, err
	}
	return stream.ExecSync(ctx, StreamRuntime(s.node), req.GetContainerId(), req.GetCmd(), timeout)
}
