package cri

import (
	"fmt"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// ImportModuleMethod is the full name of a call on the CRI socket that is not part of the CRI. It takes the pieces of a
// WebAssembly binary, a stream of google.protobuf.BytesValue, and imports the binary as an image. The answer is a
// google.protobuf.StringValue: the image's reference with its digest.
const ImportModuleMethod = "/tripod.image.v1.Images/ImportModule"

// importModule imports a binary.
func (s *Server) importModule(stream grpc.ServerStream) error {
	if s.importer == nil {
		return fmt.Errorf("this node has no handler \"wasm\", so it takes no modules: %w", errdefs.ErrFailedPrecondition)
	}
	img, err := s.importer(stream.Context(), &pieces{stream: stream})
	if err != nil {
		return err
	}
	if len(img.RepoDigests) == 0 {
		return fmt.Errorf("the imported image %s has no reference: %w", img.ID, errdefs.ErrInternal)
	}
	return stream.SendMsg(wrapperspb.String(img.RepoDigests[0]))
}

// pieces reads the contents of a stream of google.protobuf.BytesValue.
type pieces struct {
	stream grpc.ServerStream
	rest   []byte // of the latest message
}

// Read implements io.Reader. RecvMsg returns io.EOF at the end of the stream.
func (p *pieces) Read(b []byte) (int, error) {
	for len(p.rest) == 0 {
		m := &wrapperspb.BytesValue{}
		if err := p.stream.RecvMsg(m); err != nil {
			return 0, err
		}
		p.rest = m.GetValue()
	}
	n := copy(b, p.rest)
	p.rest = p.rest[n:]
	return n, nil
}
