package cri

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/until"
)

// An endpoint of an older CRI has no streaming lists, no metrics and no events.
func TestDelegateWithAnOlderCRI(t *testing.T) {
	p := openPair(t)
	p.gate.absent.Store(&[]string{"StreamPodSandboxes", "StreamContainers", "StreamImages", "StreamPodSandboxStats", "StreamContainerStats",
		"ListPodSandboxStats", "GetContainerEvents", "RuntimeConfig", "UpdateRuntimeConfig"})
	id := p.run(t, "p")
	all, err := p.pods(t)
	must(t, err)
	wantSameIDs(t, all, id)
	stream, err := p.front.StreamPodSandboxes(t.Context(), &runtimeapi.StreamPodSandboxesRequest{})
	must(t, err)
	m, err := stream.Recv()
	must(t, err)
	wantIDs(t, ids(m.GetPodSandboxes()), []string{id})
	stats, err := p.front.ListPodSandboxStats(t.Context(), &runtimeapi.ListPodSandboxStatsRequest{})
	must(t, err)
	wantEqual(t, "statistics", len(stats.GetStats()), 0)
	_, err = p.front.RuntimeConfig(t.Context(), &runtimeapi.RuntimeConfigRequest{})
	must(t, err)
	_, err = p.front.UpdateRuntimeConfig(t.Context(),
		&runtimeapi.UpdateRuntimeConfigRequest{RuntimeConfig: &runtimeapi.RuntimeConfig{NetworkConfig: &runtimeapi.NetworkConfig{PodCidr: "10.88.0.0/16"}}})
	must(t, err)
}

// The events of an endpoint that has none are the differences between lists.
func TestDelegateWithoutEvents(t *testing.T) {
	p := openPair(t)
	p.gate.absent.Store(&[]string{"GetContainerEvents"})
	gone := p.run(t, "gone")
	c := p.back.running(t, gone, "c")
	events, err := p.front.GetContainerEvents(t.Context(), &runtimeapi.GetEventsRequest{})
	must(t, err)
	received := make(chan *runtimeapi.ContainerEventResponse, 100)
	go func() {
		for e, err := events.Recv(); err == nil; e, err = events.Recv() {
			received <- e
		}
		close(received)
	}()
	next := func() (text string) {
		select {
		case e, ok := <-received:
			if !ok {
				return "the end"
			}
			return fmt.Sprint(e.GetContainerEventType(), e.GetContainerId(), e.GetPodSandboxStatus().GetMetadata().GetName(),
				len(e.GetContainersStatuses()))
		case <-time.After(3 * time.Second):
			return "nothing"
		}
	}
	n := 0
	until.NoError(t, 20*time.Second, func() error { // an endpoint does not say when its events begin
		n++
		p.run(t, fmt.Sprintf("first%d", n))
		if got := next(); got == "nothing" {
			return errors.New(got)
		}
		return nil
	})
	for next() != "nothing" { // of the same pods
	}
	id := p.run(t, "new")
	wantEqual(t, "event", next(), fmt.Sprint(runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT, id, "new", 0))
	wantEqual(t, "event", next(), fmt.Sprint(runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT, id, "new", 0))
	_, err = p.front.RemovePodSandbox(t.Context(), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: gone})
	must(t, err)
	wantEqual(t, "event", next(), fmt.Sprint(runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT, c, "gone", 0))
	wantEqual(t, "event", next(), fmt.Sprint(runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT, c, "gone", 0))
	wantEqual(t, "event", next(), fmt.Sprint(runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT, gone, "gone", 0))
	wantEqual(t, "event", next(), fmt.Sprint(runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT, gone, "gone", 0))
	p.gate.shut.Store(true)
	wantEqual(t, "event while the endpoint is away", next(), "the end")
}

func TestDelegateEvents(t *testing.T) {
	p := openPair(t)
	events, err := p.front.GetContainerEvents(t.Context(), &runtimeapi.GetEventsRequest{})
	must(t, err)
	_, err = events.Header()
	must(t, err)
	received := make(chan string, 100)
	ended := make(chan error, 1)
	go func() {
		for {
			e, err := events.Recv()
			if err != nil {
				ended <- err
				return
			}
			received <- e.GetContainerId()
		}
	}()
	wantEvent := func(id string) error {
		for {
			select {
			case got := <-received:
				if got == id {
					return nil
				}
			case <-time.After(time.Second):
				return fmt.Errorf("no event of pod %s", id)
			}
		}
	}
	must(t, wantEvent(p.front.pod(t, "own")))
	n := 0
	until.NoError(t, 10*time.Second, func() error { // an endpoint does not say when its events begin
		n++
		return wantEvent(p.run(t, fmt.Sprintf("theirs%d", n)))
	})
	must(t, p.back.node.Close())
	select {
	case err := <-ended:
		wantCode(t, err, codes.Unavailable, "delegate back", "events have ended")
	case <-time.After(10 * time.Second):
		t.Fatal("the stream goes on without the delegate's events")
	}
}

func TestDelegateImages(t *testing.T) {
	ctx := context.Background()
	p := openPair(t, func(d *Delegate) { d.ImagePrefixes = []string{"back.example/"} })
	at := func(d *door, name string) bool { _, err := d.images.Get(ctx, name); return err == nil }
	pull := func(req *runtimeapi.PullImageRequest) {
		t.Helper()
		_, err := p.front.PullImage(ctx, req)
		must(t, err)
	}
	p.run(t, "theirs")
	p.front.pod(t, "own")
	pull(&runtimeapi.PullImageRequest{Image: spec("plain.example/a")})
	pull(&runtimeapi.PullImageRequest{Image: spec("back.example/a")})
	pull(&runtimeapi.PullImageRequest{Image: spec("pod.example/a"), SandboxConfig: podConfig("theirs")})
	pull(&runtimeapi.PullImageRequest{Image: spec("back.example/own"), SandboxConfig: podConfig("own")})
	pull(&runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: "handler.example/a", RuntimeHandler: "runc"}})
	for name, back := range map[string]bool{"plain.example/a": false, "back.example/a": true, "pod.example/a": true, "back.example/own": false,
		"handler.example/a": true} {
		if at(p.back, name) != back || at(p.front, name) == back {
			t.Errorf("image %s: at the delegate %v, on this node %v; want it only at one: delegate %v", name, at(p.back, name), at(p.front, name),
				back)
		}
	}
	s, err := p.front.ImageStatus(ctx, &runtimeapi.ImageStatusRequest{Image: spec("pod.example/a")})
	must(t, err)
	if s.GetImage() == nil {
		t.Error("the status of the delegate's image is empty")
	}
	l, err := p.front.ListImages(ctx, &runtimeapi.ListImagesRequest{})
	must(t, err)
	wantEqual(t, "images, busybox only once", len(l.GetImages()), 6)
	_, err = p.front.RemoveImage(ctx, &runtimeapi.RemoveImageRequest{Image: spec("busybox")})
	must(t, err)
	wantEqual(t, "busybox is left", at(p.front, "busybox") || at(p.back, "busybox"), false)
}

// The kubelet asks for an image without a handler. If only this node has it, and the pod is the delegate's, the failure
// of CreateContainer must make the kubelet pull it there.
func TestDelegateLacksAnImageOfThisNode(t *testing.T) {
	ctx := t.Context()
	p := openPair(t)
	pod := p.run(t, "theirs")
	_, err := p.front.PullImage(ctx, &runtimeapi.PullImageRequest{Image: spec("app")})
	must(t, err)
	asked := &runtimeapi.ImageStatusRequest{Image: spec("docker.io/library/app:latest")}
	s, err := p.front.ImageStatus(ctx, asked)
	must(t, err)
	config := containerConfig("c")
	config.Image = &runtimeapi.ImageSpec{Image: s.GetImage().GetId(), UserSpecifiedImage: "app"}
	_, err = p.front.CreateContainer(ctx,
		&runtimeapi.CreateContainerRequest{PodSandboxId: pod, Config: config, SandboxConfig: podConfig("theirs")})
	wantCode(t, err, codes.NotFound)
	s, err = p.front.ImageStatus(ctx, asked)
	must(t, err)
	if s.GetImage() != nil {
		t.Fatal("the image counts as present, so the kubelet will not pull it")
	}
	pulled, err := p.front.PullImage(ctx, &runtimeapi.PullImageRequest{Image: asked.Image, SandboxConfig: podConfig("theirs")})
	must(t, err)
	config.Image.Image = pulled.GetImageRef()
	_, err = p.front.CreateContainer(ctx,
		&runtimeapi.CreateContainerRequest{PodSandboxId: pod, Config: config, SandboxConfig: podConfig("theirs")})
	must(t, err)
	s, err = p.front.ImageStatus(ctx, asked)
	must(t, err)
	wantEqual(t, "the image is present again", s.GetImage() != nil, true)
}

func TestDelegateHandlersInStatus(t *testing.T) {
	p := openPair(t, func(d *Delegate) { d.Handlers = []string{"", "kata"} })
	s, err := p.front.Status(t.Context(), &runtimeapi.StatusRequest{Verbose: true})
	must(t, err)
	var names []string
	for _, h := range s.GetRuntimeHandlers() {
		names = append(names, h.GetName())
		if h.GetName() == "kata" {
			wantEqual(t, "user namespaces of the delegate's handler", h.GetFeatures().GetUserNamespaces(), true)
		}
	}
	wantSameIDs(t, names, "", "kata", "linux", "runc", "unit")
	if s.GetInfo()["back/config"] == "" || s.GetInfo()["config"] == "" {
		t.Errorf("verbose information %v lacks this node's or the delegate's", s.GetInfo())
	}
}

// A list of more than gRPC's usual 4 MiB passes, and one of more than a message's 16 MiB names the call to use.
func TestDelegateLargeLists(t *testing.T) {
	p := openPair(t, func(d *Delegate) { d.Timeout = time.Minute })
	for i := range 14 {
		p.back.pod(t, fmt.Sprintf("p%d", i), func(c *runtimeapi.PodSandboxConfig) {
			c.Annotations = map[string]string{"a": strings.Repeat("x", 1<<20)}
		})
	}
	all, err := p.pods(t)
	must(t, err)
	wantEqual(t, "pods", len(all), 14)
	for i := range 4 {
		p.front.pod(t, fmt.Sprintf("own%d", i), func(c *runtimeapi.PodSandboxConfig) {
			c.Annotations = map[string]string{"a": strings.Repeat("x", 1<<20)}
		})
	}
	_, err = p.pods(t)
	wantCode(t, err, codes.ResourceExhausted, "StreamPodSandboxes")
	stream, err := p.front.StreamPodSandboxes(t.Context(), &runtimeapi.StreamPodSandboxesRequest{})
	must(t, err)
	n := 0
	for {
		m, err := stream.Recv()
		if err != nil {
			break
		}
		n += len(m.GetPodSandboxes())
	}
	wantEqual(t, "streamed pods", n, 18)
}

// TestDelegateMetrics: the list and the stream have the metrics of both nodes, with the labels of the one descriptor.
func TestDelegateMetrics(t *testing.T) {
	p := openPair(t)
	own, theirs := p.front.pod(t, "own"), p.run(t, "theirs")
	for _, pod := range []string{own, theirs} {
		p.front.running(t, pod, "c")
	}
	descriptors, err := p.front.ListMetricDescriptors(t.Context(), &runtimeapi.ListMetricDescriptorsRequest{})
	must(t, err)
	labels := map[string]int{}
	for _, d := range descriptors.GetDescriptors() {
		labels[d.GetName()] = len(d.GetLabelKeys())
	}
	list, err := p.front.ListPodSandboxMetrics(t.Context(), &runtimeapi.ListPodSandboxMetricsRequest{})
	must(t, err)
	for _, pods := range [][]*runtimeapi.PodSandboxMetrics{list.GetPodMetrics(), streamedMetrics(t, p.front)} {
		if len(pods) != 2 || pods[0].GetPodSandboxId() != own || pods[1].GetPodSandboxId() != theirs {
			t.Fatalf("got the metrics of %v, want those of %s and %s", pods, own, theirs)
		}
		for _, pod := range pods {
			metrics := pod.GetContainerMetrics()[0].GetMetrics()
			if len(metrics) == 0 {
				t.Errorf("pod %s has no metrics", pod.GetPodSandboxId())
			}
			for _, m := range metrics {
				if n, known := labels[m.GetName()]; !known || n != len(m.GetLabelValues()) {
					t.Errorf("got %v, want a metric with %d labels", m, n)
				}
			}
		}
	}
}
