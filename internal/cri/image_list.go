package cri

import (
	"context"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image"
)

// ListImages lists all images, or the one that the filter names.
func (s *Server) ListImages(ctx context.Context, req *runtimeapi.ListImagesRequest) (*runtimeapi.ListImagesResponse, error) {
	images, err := s.imagesOf(ctx, req.GetFilter())
	if err != nil {
		return nil, err
	}
	return &runtimeapi.ListImagesResponse{Images: images}, nil
}

// StreamImages is like ListImages, without a size limit.
func (s *Server) StreamImages(req *runtimeapi.StreamImagesRequest, stream runtimeapi.ImageService_StreamImagesServer) error {
	images, err := s.imagesOf(stream.Context(), req.GetFilter())
	if err != nil {
		return err
	}
	return sendMessages(images, func(chunk []*runtimeapi.Image) error {
		return stream.Send(&runtimeapi.StreamImagesResponse{Images: chunk})
	})
}

func (s *Server) imagesOf(ctx context.Context, f *runtimeapi.ImageFilter) ([]*runtimeapi.Image, error) {
	found, err := s.storedImages(ctx, f.GetImage().GetImage())
	if err != nil {
		return nil, err
	}
	images := make([]*runtimeapi.Image, len(found))
	for i := range found {
		images[i] = imageMessage(&found[i])
	}
	return images, nil
}

// storedImages returns the image with the given name, if it exists, or all images for "".
func (s *Server) storedImages(ctx context.Context, name string) ([]image.Image, error) {
	if name == "" {
		return s.images.List(ctx)
	}
	img, err := s.images.Get(ctx, name)
	if errdefs.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return []image.Image{img}, nil
}
