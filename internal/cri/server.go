package cri

import (
	"context"
	"log/slog"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/node"
)

// MaxMessageSize is the largest message that the server takes and gives, in bytes: what the kubelet's client takes.
// Lists that grow past it are for the Stream* calls.
const MaxMessageSize = 16 << 20

// Images is what the front door needs of the image store. Implemented by *image.Store.
type Images interface {
	Get(ctx context.Context, ref string) (image.Image, error)
	List(ctx context.Context) ([]image.Image, error)
	Pull(ctx context.Context, ref string, options image.PullOptions) (image.Image, error)
	Remove(ctx context.Context, ref string) error
	FsInfo(ctx context.Context) (image.FsUsage, error)
	ContainerFsInfo(ctx context.Context) (image.FsUsage, error)
	Verify(ctx context.Context, contents bool) ([]image.Damage, error)
}

// Streams hands out the URLs at which a client finds its exec, attach or port-forward session.
// Implemented by *stream.Server.
type Streams interface {
	GetExec(*runtimeapi.ExecRequest) (*runtimeapi.ExecResponse, error)
	GetAttach(*runtimeapi.AttachRequest) (*runtimeapi.AttachResponse, error)
	GetPortForward(*runtimeapi.PortForwardRequest) (*runtimeapi.PortForwardResponse, error)
}

// Config is what a Server is made of. All of it is needed but Health and Logger.
type Config struct {
	Node    *node.Node
	Images  Images
	Streams Streams
	// Version is the version of this program, in SemVer form.
	Version string
	// CgroupDriver is "cgroupfs" or "systemd"; the kubelet asks for it once, at its start.
	CgroupDriver string
	// Health has what the node cannot do; nil when nobody reports that.
	Health *health.Board
	// Logger is where faults of ours go; nil discards them.
	Logger *slog.Logger
}

// Server answers both services of CRI v1. Its methods may be called from many goroutines.
//
// The Unsafe* interfaces are embedded on purpose: an RPC that a new version of the API brings does not compile until
// somebody has decided what it answers.
type Server struct {
	runtimeapi.UnsafeRuntimeServiceServer
	runtimeapi.UnsafeImageServiceServer

	node         *node.Node
	images       Images
	streams      Streams
	version      string
	health       *health.Board
	cgroupDriver runtimeapi.CgroupDriver
	log          *slog.Logger

	podWire       wireMemo[node.Pod]
	containerWire wireMemo[node.Container]
}

var (
	_ runtimeapi.RuntimeServiceServer = (*Server)(nil)
	_ runtimeapi.ImageServiceServer   = (*Server)(nil)
)

// New makes the server of both services.
func New(c Config) *Server {
	s := &Server{
		node: c.Node, images: c.Images, streams: c.Streams, version: c.Version, health: c.Health,
		cgroupDriver: runtimeapi.CgroupDriver_CGROUPFS, log: c.Logger,
	}
	if c.CgroupDriver == "systemd" {
		s.cgroupDriver = runtimeapi.CgroupDriver_SYSTEMD
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	return s
}

// Register adds both services to a gRPC server that was made with ServerOptions.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	runtimeapi.RegisterRuntimeServiceServer(r, s)
	runtimeapi.RegisterImageServiceServer(r, s)
}

// ServerOptions are the options that the gRPC server needs: the interceptors, without which errors have no code, and
// the largest message.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(interceptUnary),
		grpc.ChainStreamInterceptor(interceptStream),
		grpc.MaxRecvMsgSize(MaxMessageSize),
		grpc.MaxSendMsgSize(MaxMessageSize),
	}
}
