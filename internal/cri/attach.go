package cri

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Attach returns the URL of a session that connects to the container's stdio.
func (s *Server) Attach(_ context.Context, req *runtimeapi.AttachRequest) (*runtimeapi.AttachResponse, error) {
	if req.GetContainerId() == "" {
		return nil, required("container_id")
	}
	if err := validateStdio(req.GetStdin(), req.GetStdout(), req.GetStderr(), req.GetTty()); err != nil {
		return nil, err
	}
	c, err := s.runningContainer(req.GetContainerId(), "Attach")
	if err != nil {
		return nil, err
	}
	// A client without a terminal may attach to a container with a terminal. In the opposite case stderr would be lost.
	if req.GetTty() && !c.Config.GetTty() {
		return nil, invalid("tty", "container %s was created without one", c.ID)
	}
	return s.streams.GetAttach(&runtimeapi.AttachRequest{
		ContainerId: c.ID, Tty: req.GetTty(), Stdin: req.GetStdin(), Stdout: req.GetStdout(), Stderr: req.GetStderr(),
	})
}
