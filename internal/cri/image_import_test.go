package cri

import (
	"context"
	"errors"
	"io"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tripod-run/tripod/internal/image"
)

func TestImportModule(t *testing.T) {
	d := open(t)
	upload := func(pieces ...string) (string, error) {
		stream, err := d.conn.NewStream(t.Context(), &grpc.StreamDesc{ClientStreams: true}, ImportModuleMethod)
		must(t, err)
		for _, p := range pieces {
			if err := stream.SendMsg(wrapperspb.Bytes([]byte(p))); err != nil && !errors.Is(err, io.EOF) { // the answer has the error
				return "", err
			}
		}
		must(t, stream.CloseSend())
		answer := &wrapperspb.StringValue{}
		err = stream.RecvMsg(answer)
		return answer.GetValue(), err
	}
	_, err := upload("abc")
	wantCode(t, err, codes.FailedPrecondition)

	d.server.importer = func(_ context.Context, wasm io.Reader) (image.Image, error) {
		binary, err := io.ReadAll(wasm)
		if string(binary) != "abcd" {
			err = errors.Join(err, errdefs.ErrInvalidArgument)
		}
		return image.Image{ID: "id", RepoDigests: []string{"edge.local/m@sha256:00"}}, err
	}
	ref, err := upload("abc", "", "d")
	must(t, err)
	wantEqual(t, "reference", ref, "edge.local/m@sha256:00")
	_, err = upload("abc")
	wantCode(t, err, codes.InvalidArgument)
}
