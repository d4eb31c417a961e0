package cri

import (
	"context"
	"io"
	"log/slog"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cri/delegate"
	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// MaxMessageSize limits messages in both directions, in bytes; the kubelet's client has the same limit. Longer lists
// need the Stream* calls.
const MaxMessageSize = 16 << 20

// Images is this package's interface to the image store. *image.Store implements it.
type Images interface {
	Get(ctx context.Context, ref string) (image.Image, error)
	List(ctx context.Context) ([]image.Image, error)
	Pull(ctx context.Context, ref string, options image.PullOptions) (image.Image, error)
	Remove(ctx context.Context, ref string) error
	FsInfo(ctx context.Context) (image.FsUsage, error)
	ContainerFsInfo(ctx context.Context) (image.FsUsage, error)
	Verify(ctx context.Context, contents bool) ([]image.Damage, error)
}

// Streams returns the URLs of exec, attach and port-forward sessions. *stream.Server implements it.
type Streams interface {
	GetExec(*runtimeapi.ExecRequest) (*runtimeapi.ExecResponse, error)
	GetAttach(*runtimeapi.AttachRequest) (*runtimeapi.AttachResponse, error)
	GetPortForward(*runtimeapi.PortForwardRequest) (*runtimeapi.PortForwardResponse, error)
}

// Config configures a Server. Plugins, Compilation, ImportModule, Health and Logger are optional.
type Config struct {
	Node    *node.Node
	Images  Images
	Streams Streams
	// Version is this program's semantic version.
	Version string
	// CgroupDriver is "cgroupfs" or "systemd". A kubelet asks for the driver only when the kubelet starts.
	CgroupDriver string
	// Plugins lists the connected node plugins; nil if there cannot be any.
	Plugins func() []string
	// Compilation returns the state of the code of an image's component, or false if the image has none; nil if no
	// backend compiles.
	Compilation func(imageID string) (sandbox.Compilation, bool)
	// ImportModule imports a WebAssembly binary as an image that has a reference with a digest; nil if no backend runs
	// modules.
	ImportModule func(ctx context.Context, wasm io.Reader) (image.Image, error)
	// Health reports problems of the node; nil reports none.
	Health *health.Board
	// Logger receives the node's own faults; nil discards them.
	Logger *slog.Logger
}

// Server implements both services of CRI v1. Its methods are safe for concurrent use.
//
// It embeds the Unsafe* interfaces on purpose, so that a new RPC in the API breaks the build until it has a method
// here.
type Server struct {
	runtimeapi.UnsafeRuntimeServiceServer
	runtimeapi.UnsafeImageServiceServer

	node         *node.Node
	images       Images
	streams      Streams
	version      string
	plugins      func() []string
	compilation  func(imageID string) (sandbox.Compilation, bool)
	importer     func(ctx context.Context, wasm io.Reader) (image.Image, error)
	health       *health.Board
	cgroupDriver runtimeapi.CgroupDriver
	log          *slog.Logger
	router       *delegate.Router // nil without delegates

	podWire       wireMemo[node.Pod]
	containerWire wireMemo[node.Container]
}

var (
	_ runtimeapi.RuntimeServiceServer = (*Server)(nil)
	_ runtimeapi.ImageServiceServer   = (*Server)(nil)
)

func New(c Config) *Server {
	s := &Server{
		node: c.Node, images: c.Images, streams: c.Streams, version: c.Version, plugins: c.Plugins, importer: c.ImportModule, health: c.Health,
		cgroupDriver: runtimeapi.CgroupDriver_CGROUPFS, log: c.Logger,
	}
	if c.CgroupDriver == "systemd" {
		s.cgroupDriver = runtimeapi.CgroupDriver_SYSTEMD
	}
	if s.compilation = c.Compilation; s.compilation == nil {
		s.compilation = func(string) (sandbox.Compilation, bool) { return sandbox.Compilation{}, false }
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	return s
}

// Register adds both services, and Tripod's own service for images, to a gRPC server made with ServerOptions.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	runtimeapi.RegisterRuntimeServiceServer(r, s)
	runtimeapi.RegisterImageServiceServer(r, s)
	r.RegisterService(&imagesService, s)
}

// ServerOptions returns the gRPC server's required options: the interceptors, which convert errors, and the message
// limit.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(interceptUnary),
		grpc.ChainStreamInterceptor(interceptStream),
		grpc.MaxRecvMsgSize(MaxMessageSize),
		grpc.MaxSendMsgSize(MaxMessageSize),
	}
}
