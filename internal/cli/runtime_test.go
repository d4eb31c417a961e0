package cli

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/structpb"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cri"
	"github.com/tripod-run/tripod/test/until"
)

// otherRuntime is a CRI endpoint that knows nothing of this project: no header, no call of ours.
type otherRuntime struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	runtimeapi.UnimplementedImageServiceServer
	streams atomic.Int64 // of events, so far
	metrics atomic.Int64 // requests for metrics, which it lacks
}

func (*otherRuntime) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	return &runtimeapi.VersionResponse{RuntimeApiVersion: "v1", RuntimeName: "other"}, nil
}

func (*otherRuntime) ListContainers(context.Context, *runtimeapi.ListContainersRequest) (*runtimeapi.ListContainersResponse, error) {
	return &runtimeapi.ListContainersResponse{}, nil
}

func (*otherRuntime) ListPodSandbox(context.Context, *runtimeapi.ListPodSandboxRequest) (*runtimeapi.ListPodSandboxResponse, error) {
	pod := &runtimeapi.PodSandbox{Id: "p", Metadata: &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "shop"}}
	return &runtimeapi.ListPodSandboxResponse{Items: []*runtimeapi.PodSandbox{pod}}, nil
}

func (*otherRuntime) ListPodSandboxStats(context.Context,
	*runtimeapi.ListPodSandboxStatsRequest) (*runtimeapi.ListPodSandboxStatsResponse, error) {
	return &runtimeapi.ListPodSandboxStatsResponse{}, nil
}

func (o *otherRuntime) ListPodSandboxMetrics(ctx context.Context,
	req *runtimeapi.ListPodSandboxMetricsRequest) (*runtimeapi.ListPodSandboxMetricsResponse, error) {
	o.metrics.Add(1)
	return o.UnimplementedRuntimeServiceServer.ListPodSandboxMetrics(ctx, req)
}

func (*otherRuntime) ImageFsInfo(context.Context, *runtimeapi.ImageFsInfoRequest) (*runtimeapi.ImageFsInfoResponse, error) {
	return &runtimeapi.ImageFsInfoResponse{}, nil
}

func (*otherRuntime) ListImages(context.Context, *runtimeapi.ListImagesRequest) (*runtimeapi.ListImagesResponse, error) {
	return &runtimeapi.ListImagesResponse{}, nil
}

func (*otherRuntime) PullImage(_ context.Context, req *runtimeapi.PullImageRequest) (*runtimeapi.PullImageResponse, error) {
	return &runtimeapi.PullImageResponse{ImageRef: "sha256:" + req.GetAuth().GetUsername()}, nil
}

// GetContainerEvents sends one event of a pod named after the number of the stream, and ends as a daemon that is killed.
func (o *otherRuntime) GetContainerEvents(_ *runtimeapi.GetEventsRequest, stream runtimeapi.RuntimeService_GetContainerEventsServer) error {
	n := o.streams.Add(1)
	if err := stream.SendHeader(metadata.MD{}); err != nil {
		return err
	}
	pod := &runtimeapi.PodSandboxStatus{Id: "p",
		Metadata: &runtimeapi.PodSandboxMetadata{Name: fmt.Sprintf("pod-%d", n), Namespace: "default"}}
	if err := stream.Send(&runtimeapi.ContainerEventResponse{ContainerId: "p", CreatedAt: n, PodSandboxStatus: pod}); err != nil {
		return err
	}
	return status.Error(codes.Unavailable, "the node is closing")
}

type endpoint interface {
	runtimeapi.RuntimeServiceServer
	runtimeapi.ImageServiceServer
}

// serveRuntime serves the endpoint and services of ours at $CONTAINER_RUNTIME_ENDPOINT.
func serveRuntime(t *testing.T, o endpoint, more ...*grpc.ServiceDesc) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "cri.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(server, o)
	runtimeapi.RegisterImageServiceServer(server, o)
	for _, d := range more {
		server.RegisterService(d, o)
	}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	t.Setenv(EndpointVariable, "unix://"+socket)
}

func TestPullFromAnotherRuntime(t *testing.T) {
	serveRuntime(t, &otherRuntime{})
	if out, err := runCommand(t, "pull", "x", "--creds", "me:secret"); err != nil || out != "sha256:me\n" {
		t.Errorf("pull: got %q, error %v; want the image's ID", out, err)
	}
}

// TestPullReadsProgress: the last message has the ID, and an error of the pull is that of the command.
func TestPullReadsProgress(t *testing.T) {
	fail := false
	service := &grpc.ServiceDesc{ServiceName: "tripod.image.v1.Images", HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{{
		StreamName: "PullWithProgress", ServerStreams: true, Handler: func(_ any, stream grpc.ServerStream) error {
			req := &runtimeapi.PullImageRequest{}
			if err := stream.RecvMsg(req); err != nil {
				return err
			}
			if fail {
				return status.Error(codes.NotFound, "no "+req.GetImage().GetImage())
			}
			for _, fields := range []map[string]any{{cri.ProgressDone: 1, cri.ProgressTotal: 3}, {cri.ProgressDone: 3, cri.ProgressTotal: 3},
				{cri.ProgressImageRef: "sha256:ours"}} {
				message, err := structpb.NewStruct(fields)
				if err == nil {
					err = stream.SendMsg(message)
				}
				if err != nil {
					return err
				}
			}
			return nil
		},
	}}}
	serveRuntime(t, &otherRuntime{}, service)
	client, err := Connect(t.Context(), os.Getenv(EndpointVariable), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close(t.Context())
	var seen []string
	pull := func() (string, error) {
		return client.Pull(t.Context(), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: "x"}},
			func(done, total int64) { seen = append(seen, fmt.Sprint(done, "/", total)) })
	}
	if id, err := pull(); err != nil || id != "sha256:ours" || strings.Join(seen, " ") != "1/3 3/3" {
		t.Errorf("pull: got %s, error %v, progress %v; want 1/3 3/3", id, err, seen)
	}
	fail = true
	if _, err := pull(); status.Code(err) != codes.NotFound || Explain(err) != "no x" {
		t.Errorf("pull of a missing image: got error %v, want not found", err)
	}
}

// TestEventsOfAnotherRuntime: it remembers none, and -w subscribes again when it closes the stream.
func TestEventsOfAnotherRuntime(t *testing.T) {
	o := &otherRuntime{}
	serveRuntime(t, o)
	if out, err := runCommand(t, "events"); err != errNoMemory {
		t.Errorf("events: got %s, error %v; want %v", out, err, errNoMemory)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out bytes.Buffer
	ended := make(chan error, 1)
	go func() { ended <- runCommandIn(ctx, &out, "events", "-w") }()
	until.Within(t, 30*time.Second, "three subscriptions", func() bool { return o.streams.Load() >= 4 })
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("events -w: got error %v, want nil after an interrupt", err)
	}
	for _, want := range []string{"default/pod-2", "default/pod-3",
		"the stream of events ended (the node does not answer: the node is closing); events may be missing"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("events -w: got\n%s\nwant %q", out.String(), want)
		}
	}
}
