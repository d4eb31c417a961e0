package delegate

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// Endpoint configures one CRI endpoint.
type Endpoint struct {
	// Name is unique. It appears in errors and conditions, and the record refers to the endpoint by it.
	Name string
	// Runtime and Images are the paths of the sockets of both services, which can be the same.
	Runtime, Images string
	// Handlers are the RuntimeClass handlers of the endpoint. "" is the default handler.
	Handlers []string
	// Annotations select pods that name no handler, each as KEY or KEY=VALUE.
	Annotations []string
	// ImagePrefixes select images in calls that name neither a pod nor a handler.
	ImagePrefixes []string
	// Timeout limits calls that only read. An endpoint that exceeds it is away.
	Timeout time.Duration
	// SnapshotMaxAge is how old a list may be that is given in place of an endpoint that is away.
	SnapshotMaxAge time.Duration
}

// Config configures a Router. Logger is optional.
type Config struct {
	Endpoints []Endpoint
	Node      *node.Node
	Images    node.Images
	Record    Record
	// Metrics describe this node's metrics.
	Metrics []*runtimeapi.MetricDescriptor
	// MaxMessageSize limits messages in both directions, in bytes.
	MaxMessageSize int
	Logger         *slog.Logger
}

// Router routes each call to this node or to an endpoint. Its methods are safe for concurrent use.
type Router struct {
	node      *node.Node
	images    node.Images
	endpoints []*endpoint
	owners    *owners
	metrics   []*runtimeapi.MetricDescriptor
	missing   missingImages
	maxSize   int
	log       *slog.Logger

	stop    context.CancelFunc
	workers sync.WaitGroup
}

// New reads the record and begins to watch the endpoints. It does not wait for them.
func New(c Config) (*Router, error) {
	r := &Router{node: c.Node, images: c.Images, metrics: c.Metrics, maxSize: c.MaxMessageSize, log: c.Logger}
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	for _, config := range c.Endpoints {
		e, err := newEndpoint(config, c.MaxMessageSize, r.log.With("delegate", config.Name))
		if err != nil {
			return nil, errors.Join(err, r.closeConnections())
		}
		r.endpoints = append(r.endpoints, e)
	}
	owners, err := openOwners(c.Record, r.endpoints, r.log)
	if err != nil {
		return nil, errors.Join(err, r.closeConnections())
	}
	r.owners = owners
	ctx, stop := context.WithCancel(context.Background())
	r.stop = stop
	for _, e := range r.endpoints {
		r.workers.Go(func() { e.watch(ctx, func() { r.refresh(ctx, e) }) })
	}
	return r, nil
}

// Close ends the connections. Pods of the endpoints keep running.
func (r *Router) Close() error {
	r.stop()
	err := r.closeConnections()
	r.workers.Wait()
	return err
}

func (r *Router) closeConnections() error {
	var errs []error
	for _, e := range r.endpoints {
		errs = append(errs, e.close())
	}
	return errors.Join(errs...)
}

// call is one unary call. local answers it on this node.
type call struct {
	method string
	req    proto.Message
	local  func(context.Context) (proto.Message, error)
}

// Unary is the interceptor of unary calls.
func (r *Router) Unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	message, ok := req.(proto.Message)
	if !ok {
		return handler(ctx, req)
	}
	c := &call{method: info.FullMethod, req: message, local: func(ctx context.Context) (proto.Message, error) {
		resp, err := handler(ctx, req)
		if err != nil {
			return nil, err
		}
		return resp.(proto.Message), nil
	}}
	resp, err := r.answer(ctx, c)
	if err != nil {
		return nil, err
	}
	return resp, nil
}

// answer finds out whom a call concerns. A call with the ID of a pod or container concerns its owner. So a call that
// the API adds later is forwarded, too.
func (r *Router) answer(ctx context.Context, c *call) (proto.Message, error) {
	switch req := c.req.(type) {
	case *runtimeapi.RunPodSandboxRequest:
		return r.runSandbox(ctx, c, req.GetRuntimeHandler(), req.GetConfig())
	case *runtimeapi.RestorePodRequest:
		return r.runSandbox(ctx, c, req.GetRuntimeHandler(), req.GetConfig())
	case *runtimeapi.CreateContainerRequest:
		return r.createContainer(ctx, c, req)
	case *runtimeapi.PullImageRequest:
		return r.pullImage(ctx, c, req)
	case *runtimeapi.ImageStatusRequest:
		return r.imageStatus(ctx, c, req)
	case *runtimeapi.RemoveImageRequest:
		return r.removeImage(ctx, c)
	case *runtimeapi.ImageFsInfoRequest:
		return r.imageFsInfo(ctx, c)
	case *runtimeapi.StatusRequest:
		return r.status(ctx, c)
	case *runtimeapi.RuntimeConfigRequest:
		return r.runtimeConfig(ctx, c)
	case *runtimeapi.UpdateRuntimeConfigRequest:
		return r.updateRuntimeConfig(ctx, c)
	case *runtimeapi.ListMetricDescriptorsRequest:
		return r.metricDescriptors(ctx)
	case interface{ GetContainerId() string }:
		return r.byID(ctx, c, req.GetContainerId())
	case interface{ GetPodSandboxId() string }:
		return r.byID(ctx, c, req.GetPodSandboxId())
	}
	if l := listingOf(c.method); l != nil {
		return r.list(ctx, l, c)
	}
	return c.local(ctx)
}

// Stream is the interceptor of streaming calls.
func (r *Router) Stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	if info.FullMethod == runtimeapi.RuntimeService_GetContainerEvents_FullMethodName {
		return r.events(stream, func(s grpc.ServerStream) error { return handler(srv, s) })
	}
	if l := listingOf(info.FullMethod); l != nil {
		return r.streamList(l, stream, func(s grpc.ServerStream) error { return handler(srv, s) })
	}
	return handler(srv, stream)
}
