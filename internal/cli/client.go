package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"k8s.io/client-go/util/exec"
	criapi "k8s.io/cri-api/pkg/apis"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	criclient "k8s.io/cri-client/pkg"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	encodingproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/tripod-run/tripod/internal/cri"
)

// Client combines both services of one CRI endpoint.
type Client struct {
	criapi.RuntimeService
	Images   criapi.ImageManagerService
	Endpoint string

	conn *grpc.ClientConn // for what cri-client does not offer: headers, and calls of ours
}

// Connect connects to the endpoint, a path or a URL, and queries its version. The timeout applies to each later call.
func Connect(ctx context.Context, endpoint string, timeout time.Duration) (*Client, error) {
	if strings.HasPrefix(endpoint, "/") {
		endpoint = "unix://" + endpoint
	}
	if err := reachable(endpoint); err != nil {
		return nil, err
	}
	runtime, err := criclient.NewRemoteRuntimeServiceBuilder().WithEndpoint(endpoint).
		WithConnectionTimeout(timeout).WithTracerProvider(nil).WithUseStreaming(true).Build(ctx)
	if status.Code(err) == codes.Unavailable {
		return nil, fmt.Errorf("no answer at %s: is the node running? Start it with `tripod daemon`, or set its socket with --endpoint", endpoint)
	}
	if err != nil {
		return nil, fmt.Errorf("no CRI v1 runtime service at %s: %w", endpoint, err)
	}
	images, err := criclient.NewRemoteImageServiceBuilder().WithEndpoint(endpoint).
		WithConnectionTimeout(timeout).WithTracerProvider(nil).WithUseStreaming(true).Build(ctx)
	if err != nil {
		_ = runtime.Close(ctx)
		return nil, fmt.Errorf("no CRI v1 image service at %s: %w", endpoint, err)
	}
	conn, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(cri.MaxMessageSize)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.5,
			MaxDelay: time.Second}, MinConnectTimeout: timeout}))
	if err != nil {
		_, _ = runtime.Close(ctx), images.Close(ctx)
		return nil, err
	}
	return &Client{RuntimeService: runtime, Images: images, Endpoint: endpoint, conn: conn}, nil
}

// reachable detects the two most common problems, a missing socket and missing permission, before gRPC hides them in
// its own errors.
func reachable(endpoint string) error {
	path, ok := strings.CutPrefix(endpoint, "unix://")
	if !ok {
		return fmt.Errorf("endpoint %q is neither a path nor unix://PATH", endpoint)
	}
	_, err := os.Stat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("no socket at %s: is the node running? Start it with `tripod daemon`, or set its socket with --endpoint", path)
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("socket %s: permission denied: run as root", path)
	case err != nil:
		return err
	}
	return nil
}

func (c *Client) Close(ctx context.Context) {
	_ = c.RuntimeService.Close(ctx)
	_ = c.Images.Close(ctx)
	_ = c.conn.Close()
}

// Pull pulls an image and returns its ID. It reports progress if the runtime does; the total is 0 until it is known.
func (c *Client) Pull(ctx context.Context, req *runtimeapi.PullImageRequest, report func(done, total int64)) (string, error) {
	id, err := c.pullWithProgress(ctx, req, report)
	if status.Code(err) == codes.Unimplemented { // by other runtimes
		return c.Images.PullImage(ctx, req.GetImage(), req.GetAuth(), nil)
	}
	return id, err
}

func (c *Client) pullWithProgress(ctx context.Context, req *runtimeapi.PullImageRequest, report func(done, total int64)) (string, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, cri.PullWithProgressMethod)
	if err != nil {
		return "", err
	}
	// An error of SendMsg is the end of the stream, whose reason RecvMsg returns.
	_, _ = stream.SendMsg(req), stream.CloseSend()
	for {
		message := &structpb.Struct{}
		if err := stream.RecvMsg(message); err != nil {
			return "", err
		}
		fields := message.GetFields()
		if id := fields[cri.ProgressImageRef].GetStringValue(); id != "" {
			return id, nil
		}
		report(int64(fields[cri.ProgressDone].GetNumberValue()), int64(fields[cri.ProgressTotal].GetNumberValue()))
	}
}

// AnswerSize makes a unary call and returns the size of the answer, in bytes, without decoding it.
func (c *Client) AnswerSize(ctx context.Context, method string, request proto.Message) (int, error) {
	var size int
	err := c.conn.Invoke(ctx, method, request, &size, grpc.ForceCodecV2(sizeCodec{encoding.GetCodecV2(encodingproto.Name)}))
	return size, err
}

// sizeCodec decodes a message to its size in bytes, an int.
type sizeCodec struct{ encoding.CodecV2 }

func (sizeCodec) Unmarshal(data mem.BufferSlice, size any) error {
	*size.(*int) = data.Len()
	return nil
}

// ImageStatus returns nil if the image does not exist.
func (c *Client) ImageStatus(ctx context.Context, ref string) (*runtimeapi.Image, error) {
	return c.imageStatus(ctx, &runtimeapi.ImageSpec{Image: ref})
}

// imageStatus is like ImageStatus, for the image of a pod with this handler: another CRI endpoint can own the handler.
func (c *Client) imageStatus(ctx context.Context, image *runtimeapi.ImageSpec) (*runtimeapi.Image, error) {
	resp, err := c.Images.ImageStatus(ctx, image, false)
	if err != nil {
		return nil, err
	}
	return resp.GetImage(), nil
}

// Explain formats an error for users: the runtime's message without gRPC's prefix.
func Explain(err error) string {
	var framed interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &framed) {
		return err.Error()
	}
	st := framed.GRPCStatus()
	text := st.Message()
	switch st.Code() {
	case codes.DeadlineExceeded:
		text = "took longer than allowed (--timeout): " + text
	case codes.Unimplemented:
		text = "not implemented by this runtime: " + text
	case codes.Unavailable:
		text = "the node does not answer: " + text
	}
	return strings.ReplaceAll(err.Error(), st.Err().Error(), text)
}

// ExitCode returns the program's exit code for err.
func ExitCode(err error) int {
	var exit *ExitError
	var remote exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.Code
	case errors.As(err, &remote):
		return remote.ExitStatus()
	default:
		return 1
	}
}
