package cri

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// BenchmarkLists measures the calls that a kubelet makes every second, over the real gRPC server and a unix socket,
// with 200 and with 1 000 pods of one running container. It includes the client's decoding, which dominates a list of 1
// 000; the Undecoded calls measure the server alone.
func BenchmarkLists(b *testing.B) {
	for _, pods := range []int{200, 1000} {
		d := open(b)
		pod, container := d.fill(b, pods)
		ctx := b.Context()
		for _, call := range []struct {
			name string
			call func() error
		}{
			{"ListPodSandbox", func() error { _, err := d.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{}); return err }},
			{"ListContainers", func() error { _, err := d.ListContainers(ctx, &runtimeapi.ListContainersRequest{}); return err }},
			{"PodSandboxStatus", func() error {
				_, err := d.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pod})
				return err
			}},
			{"ContainerStatus", func() error {
				_, err := d.ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: container})
				return err
			}},
			{"ListContainersOfPod", func() error {
				_, err := d.ListContainers(ctx, &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{PodSandboxId: pod}})
				return err
			}},
			{"ListPodSandboxByLabel", func() error {
				_, err := d.ListPodSandbox(ctx,
					&runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"app": "p1"}}})
				return err
			}},
			{"Status", func() error { _, err := d.Status(ctx, &runtimeapi.StatusRequest{}); return err }},
			{"ListPodSandboxUndecoded", func() error { return d.undecoded(ctx, runtimeapi.RuntimeService_ListPodSandbox_FullMethodName) }},
			{"ListContainersUndecoded", func() error { return d.undecoded(ctx, runtimeapi.RuntimeService_ListContainers_FullMethodName) }},
		} {
			b.Run(fmt.Sprintf("%s/%d", call.name, pods), func(b *testing.B) {
				b.ReportAllocs()
				took := make([]time.Duration, 0, b.N)
				for b.Loop() {
					begin := time.Now()
					must(b, call.call())
					took = append(took, time.Since(begin))
				}
				slices.Sort(took)
				b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
				b.ReportMetric(float64(took[len(took)*95/100].Microseconds()), "p95-µs")
			})
		}
	}
}

// undecoded makes a call with an empty request without decoding the answer, to measure the server alone.
func (d *door) undecoded(ctx context.Context, method string) error {
	var answer []byte
	return d.conn.Invoke(ctx, method, []byte{}, &answer, grpc.ForceCodec(rawCodec{}))
}

// rawCodec passes messages as bytes.
type rawCodec struct{}

func (rawCodec) Name() string                  { return "proto" }
func (rawCodec) Marshal(v any) ([]byte, error) { return v.([]byte), nil }
func (rawCodec) Unmarshal(raw []byte, v any) error {
	*v.(*[]byte) = raw
	return nil
}

// fill runs pods with one running container each and returns the IDs of one in the middle.
func (d *door) fill(t testing.TB, pods int) (pod, container string) {
	t.Helper()
	var wg sync.WaitGroup
	next := make(chan int)
	for range 16 {
		wg.Go(func() {
			for i := range next {
				id := d.pod(t, fmt.Sprintf("p%d", i))
				d.running(t, id, "c")
			}
		})
	}
	for i := range pods {
		next <- i
	}
	close(next)
	wg.Wait()
	middle := d.node.Pods()[pods/2]
	return middle.ID, middle.Visible()[0].ID
}
