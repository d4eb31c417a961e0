package cri

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/image"
)

// PullWithProgressMethod is the full name of a call on the CRI socket that is not part of the CRI: it takes the request of
// PullImage and answers with a stream of google.protobuf.Struct. Each message has the fields of PullProgress. The last one
// has image_ref. The errors are those of PullImage.
const PullWithProgressMethod = "/tripod.image.v1.Images/PullWithProgress"

// Fields of the messages of PullWithProgressMethod.
const (
	// ProgressDone and ProgressTotal are numbers of bytes; the total is 0 until the manifest is known.
	ProgressDone, ProgressTotal = "done", "total"
	// ProgressBlob is the digest of the blob that last made progress.
	ProgressBlob = "blob"
	// ProgressImageRef is the image's ID, in the last message only.
	ProgressImageRef = "image_ref"
)

// imagesService describes the service of PullWithProgressMethod and ImportModuleMethod.
var imagesService = grpc.ServiceDesc{
	ServiceName: "tripod.image.v1.Images",
	HandlerType: (*imagesServer)(nil),
	Streams: []grpc.StreamDesc{
		{StreamName: "PullWithProgress", ServerStreams: true, Handler: imagesHandler(imagesServer.pullWithProgress)},
		{StreamName: "ImportModule", ClientStreams: true, Handler: imagesHandler(imagesServer.importModule)},
	},
}

// imagesServer is implemented by Server.
type imagesServer interface {
	pullWithProgress(stream grpc.ServerStream) error
	importModule(stream grpc.ServerStream) error
}

func imagesHandler(call func(imagesServer, grpc.ServerStream) error) grpc.StreamHandler {
	return func(srv any, stream grpc.ServerStream) error {
		s, ok := srv.(imagesServer)
		if !ok {
			return status.Error(codes.Unimplemented, "unknown service")
		}
		return call(s, stream)
	}
}

// pullWithProgress pulls an image and sends its progress.
func (s *Server) pullWithProgress(stream grpc.ServerStream) error {
	req := &runtimeapi.PullImageRequest{}
	if err := stream.RecvMsg(req); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(stream.Context())
	defer cancel()
	latest := make(chan image.Progress, 1) // holds only the newest
	report := func(p image.Progress) {
		select {
		case <-latest:
		default:
		}
		latest <- p
	}
	result := make(chan error, 1)
	var ref string
	go func() {
		result <- guard.Call(s.log, PullWithProgressMethod, func() (err error) {
			ref, err = s.routedPull(ctx, req, report)
			return err
		})
	}()
	for {
		select {
		case p := <-latest:
			if err := sendProgress(stream,
				map[string]any{ProgressDone: p.Done, ProgressTotal: p.Total, ProgressBlob: p.Current.String()}); err != nil {
				return err
			}
		case err := <-result:
			if err != nil {
				return err
			}
			return sendProgress(stream, map[string]any{ProgressImageRef: ref})
		}
	}
}

// routedPull pulls an image, or forwards the call to the delegate that the image belongs to, which reports no progress.
func (s *Server) routedPull(ctx context.Context, req *runtimeapi.PullImageRequest, report func(image.Progress)) (string, error) {
	pull := func(ctx context.Context, _ any) (any, error) { return s.pullImage(ctx, req, report) }
	var resp any
	var err error
	if s.router == nil {
		resp, err = pull(ctx, req)
	} else {
		resp, err = s.router.Unary(ctx, req, &grpc.UnaryServerInfo{Server: s, FullMethod: runtimeapi.ImageService_PullImage_FullMethodName}, pull)
	}
	pulled, _ := resp.(*runtimeapi.PullImageResponse) // nil after an error
	return pulled.GetImageRef(), err
}

func sendProgress(stream grpc.ServerStream, fields map[string]any) error {
	message, err := structpb.NewStruct(fields)
	if err != nil {
		return err
	}
	return stream.SendMsg(message)
}
