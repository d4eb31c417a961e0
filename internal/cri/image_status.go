package cri

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image"
)

// ImageStatus describes one image. A missing image is not an error; the response is then empty.
func (s *Server) ImageStatus(ctx context.Context, req *runtimeapi.ImageStatusRequest) (*runtimeapi.ImageStatusResponse, error) {
	if err := validateImageSpec("image", req.GetImage()); err != nil {
		return nil, err
	}
	img, err := s.images.Get(ctx, req.GetImage().GetImage())
	if errdefs.IsNotFound(err) {
		return &runtimeapi.ImageStatusResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	resp := &runtimeapi.ImageStatusResponse{Image: imageMessage(&img)}
	if req.GetVerbose() {
		if resp.Info, err = s.imageInfo(&img); err != nil {
			return nil, err
		}
	}
	return resp, nil
}

// InfoCompilation is the key of the state of an image's component (sandbox.Compilation) in the verbose part of
// ImageStatus.
const InfoCompilation = "compilation"

// imageInfo returns the verbose part of ImageStatus. crictl reads the configuration from "info", under "imageSpec".
func (s *Server) imageInfo(img *image.Image) (map[string]string, error) {
	info := map[string]any{
		"kind": img.Kind, "manifest": img.Manifest, "chainID": img.ChainID, "annotations": img.Annotations, "imageSpec": img.Config,
	}
	if c, ok := s.compilation(img.ID); ok {
		info[InfoCompilation] = c
	}
	raw, err := json.Marshal(info)
	if err != nil {
		return nil, fmt.Errorf("encode the configuration of image %s: %w", img.ID, err)
	}
	return map[string]string{"info": string(raw)}, nil
}
