package cri

import (
	"context"
	"encoding/json"
	"fmt"

	"google.golang.org/grpc/metadata"

	"github.com/tripod-run/tripod/internal/image"
)

// A verbose Status with this header reports damaged images in Info["images"], as a JSON list of image.Damage. The value says
// how to check: by presence, or by reading all contents, which takes as long as the disk needs.
const (
	HeaderVerify         = "tripod-verify"
	HeaderVerifyPresence = "presence"
	HeaderVerifyContents = "contents"
)

// verifyImages adds the requested check of the images to info.
func (s *Server) verifyImages(ctx context.Context, info map[string]string) error {
	md, _ := metadata.FromIncomingContext(ctx)
	asked := md.Get(HeaderVerify)
	if len(asked) == 0 {
		return nil
	}
	if asked[0] != HeaderVerifyPresence && asked[0] != HeaderVerifyContents {
		return invalid(HeaderVerify, "%q is neither %q nor %q", asked[0], HeaderVerifyPresence, HeaderVerifyContents)
	}
	found, err := s.images.Verify(ctx, asked[0] == HeaderVerifyContents)
	if err != nil {
		return err
	}
	if found == nil {
		found = []image.Damage{}
	}
	raw, err := json.Marshal(found)
	if err != nil {
		return fmt.Errorf("encode the list of damaged images: %w", err)
	}
	info["images"] = string(raw)
	return nil
}
