package cri

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const (
	// kubeletAPIVersion is the version of the "kubelet runtime API" that every kubelet requires
	// (VersionResponse.version).
	kubeletAPIVersion = "0.1.0"
	runtimeName       = "tripod"
	runtimeAPIVersion = "v1"
)

func (s *Server) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	return &runtimeapi.VersionResponse{
		Version: kubeletAPIVersion, RuntimeName: runtimeName, RuntimeVersion: s.version, RuntimeApiVersion: runtimeAPIVersion,
	}, nil
}
