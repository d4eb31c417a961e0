package cri

import (
	"context"
	"encoding/json"
	"fmt"

	"google.golang.org/grpc/metadata"

	"github.com/tripod-run/tripod/internal/image"
)

// A verbose Status call with the header HeaderVerify reports damaged images in Info["images"], as a JSON list of
// image.Damage. With the value HeaderVerifyPresence, the call checks only whether the data is present. With
// HeaderVerifyContents, it reads all contents from disk and checks them.
const (
	HeaderVerify         = "tripod-verify"
	HeaderVerifyPresence = "presence"
	HeaderVerifyContents = "contents"
)

// verifyImages adds the result of the requested check to info.
func (s *Server) verifyImages(ctx context.Context, info map[string]string) error {
	md, _ := metadata.FromIncomingContext(ctx)
	values := md.Get(HeaderVerify)
	if len(values) == 0 {
		return nil
	}
	if values[0] != HeaderVerifyPresence && values[0] != HeaderVerifyContents {
		return invalid(HeaderVerify, "%q is neither %q nor %q", values[0], HeaderVerifyPresence, HeaderVerifyContents)
	}
	found, err := s.images.Verify(ctx, values[0] == HeaderVerifyContents)
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
