package host

import (
	"context"
	"fmt"
	"net"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// cri connects to the daemon's socket, by SSH.
func (g *guest) cri(t testing.TB) runtimeapi.RuntimeServiceClient {
	t.Helper()
	dial := func(context.Context, string) (net.Conn, error) {
		s, err := g.session() // connects if necessary
		if err != nil {
			return nil, err
		}
		s.Close()
		return g.client.Dial("unix", "/run/tripod/tripod.sock")
	}
	conn, err := grpc.NewClient("passthrough:tripod", grpc.WithContextDialer(dial), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return runtimeapi.NewRuntimeServiceClient(conn)
}

// runLimited runs a container with these resources, and returns its ID.
func runLimited(t testing.TB, client runtimeapi.RuntimeServiceClient, handler string,
	resources *runtimeapi.LinuxContainerResources) string {
	t.Helper()
	return runContainer(t, client, handler,
		func(_ *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig) { c.Linux.Resources = resources })
}

// single counts the pods of runContainer: two with one name would be one pod.
var single atomic.Int32

// runContainer runs a container in a pod of its own, with changes of their configurations, and returns its ID.
func runContainer(t testing.TB, client runtimeapi.RuntimeServiceClient, handler string,
	changes ...func(*runtimeapi.PodSandboxConfig, *runtimeapi.ContainerConfig)) string {
	t.Helper()
	name := fmt.Sprintf("single-%s-%d", handler, single.Add(1))
	pod := &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: name, Uid: name, Namespace: "default"},
		Linux:    &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{NamespaceOptions: &runtimeapi.NamespaceOption{}}},
	}
	config := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name}, Image: &runtimeapi.ImageSpec{Image: nginx},
		Linux: &runtimeapi.LinuxContainerConfig{SecurityContext: &runtimeapi.LinuxContainerSecurityContext{NamespaceOptions: &runtimeapi.NamespaceOption{}}},
	}
	for _, change := range changes {
		change(pod, config)
	}
	made, err := client.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: pod, RuntimeHandler: handler})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, _ = client.RemovePodSandbox(context.Background(), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: made.GetPodSandboxId()})
	})
	node.run(t, "tripod pull %s >/dev/null", nginx)
	c, err := client.CreateContainer(t.Context(),
		&runtimeapi.CreateContainerRequest{PodSandboxId: made.GetPodSandboxId(), SandboxConfig: pod, Config: config})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := client.StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: c.GetContainerId()}); err != nil {
		t.Fatal(err)
	}
	return c.GetContainerId()
}
