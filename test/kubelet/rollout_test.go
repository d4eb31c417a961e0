package kubelet

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	corev1 "k8s.io/api/core/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/kube"
)

// TestRolloutLosesNoCall updates a Deployment of components while a client makes 200 calls per second through its
// Service: half of them over one permanent connection, half over a new connection each. No call fails.
func TestRolloutLosesNoCall(t *testing.T) {
	n := kube.Shared(t).Namespace(t)
	n.Apply(greeters)
	n.WaitPods("app=greeter", 10, kube.Timeout)
	var service corev1.Service
	if err := n.Get("services/greeter", &service); err != nil {
		t.Fatal(err)
	}
	address := service.Spec.ClusterIP + ":80"
	n.Await("the Service answers", kube.Timeout, func() error { return greetOnce(address) })
	calls := startCalls(t, address)
	for version := range 2 {
		n.Kubectl("set", "env", "deployment/greeter", fmt.Sprint("VERSION=", version))
		n.Kubectl("rollout", "status", "deployment/greeter", "--timeout=5m")
		n.WaitPods("app=greeter", 10, kube.Timeout)
	}
	made, failed := calls.stop()
	if made < 1000 {
		t.Errorf("calls made: got %d, want at least 1000", made)
	}
	if len(failed) > 0 {
		reasons := map[string]int{}
		for _, err := range failed {
			reasons[err.Error()]++
		}
		t.Errorf("failed calls: got %d of %d, want none: %v", len(failed), made, reasons)
	}
	t.Logf("%d calls during two updates of ten pods", made)
}

// greeters is a Deployment with the settings that docs/wasm.md recommends for updates without lost calls.
const greeters = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: greeter}
spec:
  replicas: 10
  selector: {matchLabels: {app: greeter}}
  template:
    metadata: {labels: {app: greeter}}
    spec:
      runtimeClassName: wasm
      containers:
      - name: greeter
        image: ` + harness.GreeterC + `
        readinessProbe: {grpc: {port: 80}, periodSeconds: 1}
        lifecycle: {preStop: {sleep: {seconds: 5}}}
---
apiVersion: v1
kind: Service
metadata: {name: greeter}
spec:
  selector: {app: greeter}
  ports: [{port: 80}]
`

// calls is a client that makes calls until stop.
type calls struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup
	made   atomic.Int64
	mu     sync.Mutex
	failed []error
}

// callPause is the interval between calls over the permanent connection, and also between calls over new connections.
const callPause = 10 * time.Millisecond

func startCalls(t *testing.T, address string) *calls {
	t.Helper()
	shared, err := dial(address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = shared.Close() })
	ctx, cancel := context.WithCancel(context.Background())
	c := &calls{cancel: cancel}
	t.Cleanup(cancel)
	c.every(ctx, func() error { return sayHello(shared) })
	c.every(ctx, func() error { return greetOnce(address) })
	return c
}

// greetOnce makes a call over a new connection.
func greetOnce(address string) error {
	conn, err := dial(address)
	if err != nil {
		return err
	}
	defer conn.Close()
	return sayHello(conn)
}

// every starts a call at each tick, even while earlier calls are in progress.
func (c *calls) every(ctx context.Context, call func() error) {
	c.wg.Go(func() {
		tick := time.NewTicker(callPause)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			c.wg.Go(func() {
				err := call()
				c.made.Add(1)
				if err != nil {
					c.mu.Lock()
					defer c.mu.Unlock()
					c.failed = append(c.failed, err)
				}
			})
		}
	})
}

func (c *calls) stop() (made int64, failed []error) {
	c.cancel()
	c.wg.Wait()
	return c.made.Load(), c.failed
}

func dial(address string) (*grpc.ClientConn, error) {
	return grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(raw{})))
}

// sayHello calls the greeter and checks its answer.
func sayHello(conn *grpc.ClientConn) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	request, answer := []byte("\x0a\x03Ada"), []byte(nil) // HelloRequest{name: "Ada"}
	if err := conn.Invoke(ctx, "/greet.v1.Greeter/SayHello", &request, &answer); err != nil {
		return err
	}
	if want := "\x0a\x0bHello, Ada!"; string(answer) != want {
		return fmt.Errorf("answer of the greeter: got %q, want %q", answer, want)
	}
	return nil
}

// raw is a codec for messages that are already encoded.
type raw struct{}

var _ encoding.CodecV2 = raw{}

func (raw) Name() string { return "proto" }

func (raw) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil
}

func (raw) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}
