package cri

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	crierrors "k8s.io/cri-api/pkg/errors"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/image/registry"
)

// PullImage pulls an image and returns its ID, which other calls accept as the image's name.
func (s *Server) PullImage(ctx context.Context, req *runtimeapi.PullImageRequest) (*runtimeapi.PullImageResponse, error) {
	return s.pullImage(ctx, req, nil)
}

// pullImage reports its progress to a function that may be nil.
func (s *Server) pullImage(ctx context.Context, req *runtimeapi.PullImageRequest,
	report func(image.Progress)) (*runtimeapi.PullImageResponse, error) {
	if err := validateImageSpec("image", req.GetImage()); err != nil {
		return nil, err
	}
	if err := s.checkImageHandler("image", req.GetImage()); err != nil {
		return nil, err
	}
	img, err := s.images.Pull(ctx, req.GetImage().GetImage(), image.PullOptions{Auth: login(req.GetAuth()), OnProgress: report})
	if err != nil {
		return nil, pullError(ctx, err)
	}
	return &runtimeapi.PullImageResponse{ImageRef: img.ID}, nil
}

// checkImageHandler rejects an image for a handler that this node does not have. The handler need not be ready.
func (s *Server) checkImageHandler(field string, spec *runtimeapi.ImageSpec) error {
	if spec.GetRuntimeHandler() == "" {
		return nil
	}
	if _, _, err := s.node.Handler(spec.GetRuntimeHandler()); err != nil {
		return fmt.Errorf("%s.runtime_handler: %w", field, err)
	}
	return nil
}

// pullError adds to err the name by which the kubelet recognises a refused signature or an unreachable registry, unless
// the caller cancelled the pull or the local store failed.
func pullError(ctx context.Context, err error) error {
	if errors.Is(err, image.ErrSignature) {
		return fmt.Errorf("%w: %w", crierrors.ErrSignatureValidationFailed, err)
	}
	if ctx.Err() == nil && errdefs.IsUnavailable(err) && !errors.Is(err, image.ErrNotOpen) {
		return fmt.Errorf("%w: %w", crierrors.ErrRegistryUnavailable, err)
	}
	return err
}

// login reads the request's credentials. For a registry without credentials the kubelet sends an empty message.
func login(a *runtimeapi.AuthConfig) *registry.Auth {
	auth := registry.Auth{
		Username: a.GetUsername(), Password: a.GetPassword(), Auth: a.GetAuth(), ServerAddress: a.GetServerAddress(),
		IdentityToken: a.GetIdentityToken(), RegistryToken: a.GetRegistryToken(),
	}
	if auth == (registry.Auth{ServerAddress: auth.ServerAddress}) {
		return nil
	}
	return &auth
}
