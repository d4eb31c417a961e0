package cri

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// Exec returns the URL of a session that runs a command in the container.
func (s *Server) Exec(_ context.Context, req *runtimeapi.ExecRequest) (*runtimeapi.ExecResponse, error) {
	if err := validateCommand(req.GetContainerId(), req.GetCmd()); err != nil {
		return nil, err
	}
	if err := validateStdio(req.GetStdin(), req.GetStdout(), req.GetStderr(), req.GetTty()); err != nil {
		return nil, err
	}
	c, err := s.runningContainer(req.GetContainerId(), "Exec")
	if err != nil {
		return nil, err
	}
	return s.streams.GetExec(&runtimeapi.ExecRequest{
		ContainerId: c.ID, Cmd: req.GetCmd(), Tty: req.GetTty(),
		Stdin: req.GetStdin(), Stdout: req.GetStdout(), Stderr: req.GetStderr(),
	})
}

// runningContainer finds a container. It returns an error if the container is not running, so that the client does not
// get the URL of a session that must fail. The node checks again when the session begins.
func (s *Server) runningContainer(id, call string) (*node.Container, error) {
	c, _, err := s.node.Container(id)
	if err != nil {
		return nil, err
	}
	if !isRunning(c) {
		return nil, fmt.Errorf("%s: container %s is %s, not Running: %w", call, c.ID, c.State, errdefs.ErrFailedPrecondition)
	}
	return c, nil
}

func validateStdio(stdin, stdout, stderr, tty bool) error {
	if !stdin && !stdout && !stderr {
		return invalid("stdin, stdout, stderr", "at least one must be set")
	}
	if tty && stderr {
		return invalid("stderr", "must not be set with tty: a terminal has one output")
	}
	return nil
}

func validateCommand(containerID string, cmd []string) error {
	if containerID == "" {
		return required("container_id")
	}
	if len(cmd) == 0 || cmd[0] == "" {
		return required("cmd")
	}
	return validateWords("cmd", cmd)
}
