package harness

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	internalapi "k8s.io/cri-api/pkg/apis"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	criclient "k8s.io/cri-client/pkg"
)

// rpcTimeout is how long one call of the kubelet's client may take.
const rpcTimeout = 2 * time.Minute

// clients are the connections to one life of the daemon.
type clients struct {
	mu      *sync.Mutex // guards the making of runtime and images
	conn    *grpc.ClientConn
	raw     runtimeapi.RuntimeServiceClient
	rawImg  runtimeapi.ImageServiceClient
	runtime internalapi.RuntimeService
	images  internalapi.ImageManagerService
}

// connect makes the raw connection; the kubelet's clients, which insist on an answer at once, are made when asked for.
func (d *Daemon) connect() error {
	conn, err := Dial(d.Socket)
	if err != nil {
		return err
	}
	d.clients = clients{mu: new(sync.Mutex), conn: conn, raw: runtimeapi.NewRuntimeServiceClient(conn), rawImg: runtimeapi.NewImageServiceClient(conn)}
	return nil
}

func (d *Daemon) disconnect() {
	if d.conn != nil {
		_ = d.conn.Close()
	}
	if d.runtime != nil {
		_ = d.runtime.Close(context.Background())
	}
	if d.images != nil {
		_ = d.images.Close(context.Background())
	}
	d.clients = clients{}
}

// Dial connects to the CRI socket of any runtime.
func Dial(socket string) (*grpc.ClientConn, error) {
	// gRPC's own first pause is a second, which a daemon that starts in 50 ms would be waited for in vain.
	soon := grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1.5, MaxDelay: 100 * time.Millisecond}}
	return grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(soon),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16<<20)))
}

// Conn is the raw connection, CRI and ImageCRI are its generated clients: what was sent and answered, unchanged.
func (d *Daemon) Conn() *grpc.ClientConn { return d.conn }

// CRI is the generated client of the RuntimeService.
func (d *Daemon) CRI() runtimeapi.RuntimeServiceClient { return d.raw }

// ImageCRI is the generated client of the ImageService.
func (d *Daemon) ImageCRI() runtimeapi.ImageServiceClient { return d.rawImg }

// Runtime is the kubelet's own client, which refuses answers that the kubelet could not use.
func (d *Daemon) Runtime() internalapi.RuntimeService {
	d.t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.runtime == nil {
		r, err := criclient.NewRemoteRuntimeServiceBuilder().WithEndpoint("unix://" + d.Socket).
			WithConnectionTimeout(rpcTimeout).WithTracerProvider(nil).Build(context.Background())
		if err != nil {
			d.t.Fatal(err)
		}
		d.runtime = r
	}
	return d.runtime
}

// Images is the kubelet's client of the ImageService.
func (d *Daemon) Images() internalapi.ImageManagerService {
	d.t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.images == nil {
		i, err := criclient.NewRemoteImageServiceBuilder().WithEndpoint("unix://" + d.Socket).
			WithConnectionTimeout(rpcTimeout).WithTracerProvider(nil).Build(context.Background())
		if err != nil {
			d.t.Fatal(err)
		}
		d.images = i
	}
	return d.images
}

// RemoveAllPods stops and removes every pod that the daemon knows.
func (d *Daemon) RemoveAllPods() error {
	ctx, cancel := context.WithTimeout(context.Background(), rpcTimeout)
	defer cancel()
	all := metadata.AppendToOutgoingContext(ctx, "tripod-pods", "all") // those of modules, too, which a kubelet is not shown
	list, err := d.raw.ListPodSandbox(all, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range list.Items {
		_, stopErr := d.raw.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: p.Id})
		_, removeErr := d.raw.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: p.Id})
		if err := errors.Join(stopErr, removeErr); err != nil {
			errs = append(errs, fmt.Errorf("pod %s (%s): %w", p.GetMetadata().GetName(), p.Id, err))
		}
	}
	return errors.Join(errs...)
}
