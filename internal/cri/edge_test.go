package cri

import (
	"context"
	"fmt"
	"io"
	"testing"

	"github.com/tripod-run/tripod/internal/keys"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestModulesAreHiddenFromTheKubelet: lists omit edge modules' pods, which a kubelet would end. A client that asks for
// all pods, or names a pod, sees them.
func TestModulesAreHiddenFromTheKubelet(t *testing.T) {
	d := open(t)
	image := d.images.add("registry.example/m", "")
	config := podConfig("module")
	config.Labels = map[string]string{"of": "edge"}
	config.Annotations = map[string]string{keys.EdgeRuntime: "uuid"}
	pod, err := d.node.RunSandbox(t.Context(), config, "linux")
	must(t, err)
	c := containerConfig("module")
	c.Image.Image, c.Labels = image.ID, config.Labels
	container, err := d.node.CreateContainer(t.Context(), pod, c)
	must(t, err)
	must(t, d.node.StartContainer(t.Context(), container))
	other := d.pod(t, "kubelets")

	all := metadata.AppendToOutgoingContext(t.Context(), HeaderPods, HeaderPodsAll)
	count := func(ctx context.Context, id string, labels map[string]string) string {
		pods, err := d.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{Id: id, LabelSelector: labels}})
		must(t, err)
		containers, err := d.ListContainers(ctx,
			&runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{PodSandboxId: id, LabelSelector: labels}})
		must(t, err)
		podStats, err := d.ListPodSandboxStats(ctx,
			&runtimeapi.ListPodSandboxStatsRequest{Filter: &runtimeapi.PodSandboxStatsFilter{Id: id, LabelSelector: labels}})
		must(t, err)
		stats, err := d.ListContainerStats(ctx,
			&runtimeapi.ListContainerStatsRequest{Filter: &runtimeapi.ContainerStatsFilter{PodSandboxId: id, LabelSelector: labels}})
		must(t, err)
		return fmt.Sprint(len(pods.Items), len(containers.Containers), len(podStats.Stats), len(stats.Stats))
	}
	wantEqual(t, "listed to a kubelet", count(t.Context(), "", nil), "1 0 1 0")
	wantEqual(t, "listed to who asks for all", count(all, "", nil), "2 1 2 1")
	wantEqual(t, "listed by ID", count(t.Context(), pod, nil), "1 1 1 1")
	wantEqual(t, "listed by label", count(t.Context(), "", config.Labels), "1 1 1 1")
	stream, err := d.StreamPodSandboxes(t.Context(), &runtimeapi.StreamPodSandboxesRequest{})
	must(t, err)
	chunk, err := stream.Recv()
	must(t, err)
	wantEqual(t, "streamed to a kubelet", len(chunk.PodSandboxes), 1)
	if _, err := stream.Recv(); err != io.EOF {
		t.Errorf("end of the stream: got error %v, want io.EOF", err)
	}

	events, err := d.GetContainerEvents(t.Context(), &runtimeapi.GetEventsRequest{})
	must(t, err)
	_, err = events.Header()
	must(t, err)
	must(t, d.node.StopSandbox(t.Context(), pod))
	must(t, d.node.StopSandbox(t.Context(), other))
	e, err := events.Recv()
	must(t, err)
	wantEqual(t, "the first event is of", e.ContainerId, other)
}

// TestReservedAnnotations: annotations reserved for edge modules are refused.
func TestReservedAnnotations(t *testing.T) {
	d := open(t)
	image := d.images.add("registry.example/m", "")
	config := podConfig("p")
	config.Annotations = map[string]string{keys.EdgeRuntime: "uuid"}
	_, err := d.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: config})
	wantCode(t, err, codes.InvalidArgument, "config.annotations", keys.EdgeRuntime)
	pod := d.pod(t, "q")
	c := containerConfig("c")
	c.Image.Image, c.Annotations = image.ID, map[string]string{keys.EdgeChannels: "[]"}
	_, err = d.CreateContainer(t.Context(), &runtimeapi.CreateContainerRequest{PodSandboxId: pod, Config: c, SandboxConfig: podConfig("q")})
	wantCode(t, err, codes.InvalidArgument, "config.annotations", keys.EdgeChannels)
}
