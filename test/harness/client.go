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

// rpcTimeout bounds a call of the kubelet's client.
const rpcTimeout = 2 * time.Minute

// clients holds the connections to one process of the daemon.
type clients struct {
	mu      *sync.Mutex // guards runtime and images
	conn    *grpc.ClientConn
	raw     runtimeapi.RuntimeServiceClient
	rawImg  runtimeapi.ImageServiceClient
	runtime internalapi.RuntimeService
	images  internalapi.ImageManagerService
}

// connect makes the raw connection. The kubelet's clients are made on first use, because they cannot be made unless the
// daemon answers at once.
func (d *Daemon) connect() error {
	conn, err := Dial(d.Socket)
	if err != nil {
		return err
	}
	d.clients = clients{mu: new(sync.Mutex), conn: conn, raw: runtimeapi.NewRuntimeServiceClient(conn),
		rawImg: runtimeapi.NewImageServiceClient(conn)}
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
	// gRPC's default first pause is a second, which is too long for a daemon that starts in 50 ms.
	soon := grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1.5, MaxDelay: 100 * time.Millisecond}}
	return grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(soon),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(16<<20)))
}

// Conn returns the raw connection. The clients from CRI and ImageCRI use this connection, and pass on requests and
// answers unchanged.
func (d *Daemon) Conn() *grpc.ClientConn { return d.conn }

// CRI returns the generated client of the RuntimeService.
func (d *Daemon) CRI() runtimeapi.RuntimeServiceClient { return d.raw }

// ImageCRI returns the generated client of the ImageService.
func (d *Daemon) ImageCRI() runtimeapi.ImageServiceClient { return d.rawImg }

// Runtime returns the kubelet's client, which refuses answers that the kubelet could not use.
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

// Images returns the kubelet's client of the ImageService.
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

// RemoveAllPods stops and removes all pods of the daemon.
func (d *Daemon) RemoveAllPods() error {
	ctx, cancel := context.WithTimeout(context.Background(), rpcTimeout)
	defer cancel()
	all := metadata.AppendToOutgoingContext(ctx, "tripod-pods", "all") // includes pods of modules, which a kubelet does not see
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
