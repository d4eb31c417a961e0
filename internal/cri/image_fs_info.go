package cri

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image"
)

// ImageFsInfo returns the disk usage of images and of containers' writable layers.
func (s *Server) ImageFsInfo(ctx context.Context, _ *runtimeapi.ImageFsInfoRequest) (*runtimeapi.ImageFsInfoResponse, error) {
	images, err := s.images.FsInfo(ctx)
	if err != nil {
		return nil, err
	}
	containers, err := s.images.ContainerFsInfo(ctx)
	if err != nil {
		return nil, err
	}
	return &runtimeapi.ImageFsInfoResponse{
		ImageFilesystems:     []*runtimeapi.FilesystemUsage{fsUsage(images)},
		ContainerFilesystems: []*runtimeapi.FilesystemUsage{fsUsage(containers)},
	}, nil
}

func fsUsage(u image.FsUsage) *runtimeapi.FilesystemUsage {
	return &runtimeapi.FilesystemUsage{
		Timestamp: nano(u.Timestamp), FsId: &runtimeapi.FilesystemIdentifier{Mountpoint: u.Mountpoint},
		UsedBytes: &runtimeapi.UInt64Value{Value: u.UsedBytes}, InodesUsed: &runtimeapi.UInt64Value{Value: u.InodesUsed},
	}
}
