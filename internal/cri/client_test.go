package cri

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	internalapi "k8s.io/cri-api/pkg/apis"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	criclient "k8s.io/cri-client/pkg"
)

// The kubelet's own client rejects some answers that the API allows: without an ID, a name, an image, a size, a
// condition. This walks through a pod's life with it, with unary and streamed lists.
func TestKubeletsClientAcceptsEveryAnswer(t *testing.T) {
	for name, streaming := range map[string]bool{"unary lists": false, "streamed lists": true} {
		t.Run(name, func(t *testing.T) {
			d := open(t)
			runtime, err := criclient.NewRemoteRuntimeServiceBuilder().WithEndpoint("unix://" + d.socket).
				WithConnectionTimeout(time.Minute).WithTracerProvider(nil).WithUseStreaming(streaming).Build(t.Context())
			must(t, err)
			t.Cleanup(func() { _ = runtime.Close(t.Context()) })
			images, err := criclient.NewRemoteImageServiceBuilder().WithEndpoint("unix://" + d.socket).
				WithConnectionTimeout(time.Minute).WithTracerProvider(nil).WithUseStreaming(streaming).Build(t.Context())
			must(t, err)
			t.Cleanup(func() { _ = images.Close(t.Context()) })
			ref := walkImages(t, images)
			walkPod(t, runtime, ref)
		})
	}
}

func walkImages(t *testing.T, c internalapi.ImageManagerService) string {
	t.Helper()
	ctx := t.Context()
	ref, err := c.PullImage(ctx, spec("nginx"), nil, nil)
	must(t, err)
	s, err := c.ImageStatus(ctx, spec(ref), true)
	must(t, err)
	wantEqual(t, "image", s.GetImage().GetId(), ref)
	all, err := c.ListImages(ctx, nil)
	must(t, err)
	wantEqual(t, "images", len(all), 2)
	_, err = c.ImageFsInfo(ctx)
	must(t, err)
	must(t, c.RemoveImage(ctx, spec("busybox")))
	gone, err := c.ImageStatus(ctx, spec("busybox"), false)
	must(t, err)
	if gone.GetImage() != nil {
		t.Errorf("ImageStatus of a removed image = %v, want none", gone)
	}
	return ref
}

func walkPod(t *testing.T, c internalapi.RuntimeService, image string) {
	t.Helper()
	ctx := t.Context()
	_, err := c.Version(ctx, "0.1.0")
	must(t, err)
	_, err = c.Status(ctx, true)
	must(t, err)
	_, err = c.RuntimeConfig(ctx)
	must(t, err)
	must(t, c.UpdateRuntimeConfig(ctx, &runtimeapi.RuntimeConfig{NetworkConfig: &runtimeapi.NetworkConfig{PodCidr: "10.88.0.0/16"}}))
	pod, err := c.RunPodSandbox(ctx, podConfig("p"), "")
	must(t, err)
	config := containerConfig("c")
	config.Image = spec(image)
	id, err := c.CreateContainer(ctx, pod, config, podConfig("p"))
	must(t, err)
	must(t, c.StartContainer(ctx, id))

	_, err = c.PodSandboxStatus(ctx, pod, true)
	must(t, err)
	_, err = c.ContainerStatus(ctx, id, true)
	must(t, err)
	pods, err := c.ListPodSandbox(ctx, nil)
	must(t, err)
	wantIDs(t, ids(pods), []string{pod})
	containers, err := c.ListContainers(ctx, nil)
	must(t, err)
	wantIDs(t, ids(containers), []string{id})
	_, err = c.ContainerStats(ctx, id)
	must(t, err)
	containerStats, err := c.ListContainerStats(ctx, nil)
	must(t, err)
	wantEqual(t, "container figures", len(containerStats), 1)
	_, err = c.PodSandboxStats(ctx, pod)
	must(t, err)
	podStats, err := c.ListPodSandboxStats(ctx, nil)
	must(t, err)
	wantEqual(t, "pod figures", len(podStats), 1)
	out, _, err := c.ExecSync(ctx, id, []string{"echo", "hello"}, time.Minute)
	must(t, err)
	wantEqual(t, "output", string(out), "hello\n")
	_, err = c.Exec(ctx, &runtimeapi.ExecRequest{ContainerId: id, Cmd: []string{"echo"}, Stdout: true})
	must(t, err)
	_, err = c.PortForward(ctx, &runtimeapi.PortForwardRequest{PodSandboxId: pod, Port: []int32{80}})
	must(t, err)
	must(t, c.UpdateContainerResources(ctx, id, &runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{CpuShares: 7}}))

	must(t, c.StopContainer(ctx, id, 1))
	must(t, c.RemoveContainer(ctx, id))
	must(t, c.StopPodSandbox(ctx, pod))
	must(t, c.RemovePodSandbox(ctx, pod))
	_, err = c.PodSandboxStatus(ctx, pod, false)
	wantCode(t, err, codes.NotFound)
}
