package e2e

import (
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

func TestRuntimeInfo(t *testing.T) {
	ctx := context.Background()
	d := harness.StartDaemon(t)
	t.Run("runtime should return version info [Conformance]", func(t *testing.T) {
		v, err := d.Runtime().Version(ctx, "v1")
		if err != nil || v.Version == "" || v.RuntimeName != "tripod" || v.RuntimeVersion == "" || v.RuntimeApiVersion != "v1" {
			t.Errorf("version: got %v, error %v; want tripod's version and the API v1", v, err)
		}
	})
	t.Run("runtime should return runtime conditions [Conformance]", func(t *testing.T) {
		s, err := d.Runtime().Status(ctx, true)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{runtimeapi.RuntimeReady, runtimeapi.NetworkReady} {
			if !slices.ContainsFunc(s.Status.Conditions, func(c *runtimeapi.RuntimeCondition) bool { return c.Type == name && c.Status }) {
				t.Errorf("conditions: got %v, want %s true", s.Status.Conditions, name)
			}
		}
		if len(s.Info) == 0 || len(s.RuntimeHandlers) < 2 || s.Features == nil {
			t.Errorf("status: got %v, want information, at least two handlers, and features", s)
		}
	})
	t.Run("the kubelet learns the cgroup driver", func(t *testing.T) {
		c, err := d.Runtime().RuntimeConfig(ctx)
		if err != nil || c.GetLinux().GetCgroupDriver() != runtimeapi.CgroupDriver_CGROUPFS {
			t.Errorf("RuntimeConfig: got %v, error %v; want the cgroup driver cgroupfs", c, err)
		}
	})
	// Roots of user namespaces pass through the state directory (ADR 40), and see nothing in it.
	t.Run("C7 the daemon's files are its own", func(t *testing.T) {
		for path, want := range map[string]os.FileMode{d.Socket: 0o600, d.Root: 0o700, d.State: 0o711} {
			fi, err := os.Stat(path)
			if err != nil || fi.Mode().Perm() != want {
				t.Errorf("mode of %s: got %v, error %v; want %v", path, fi.Mode(), err, want)
			}
		}
	})
}

func TestNetworkNotReady(t *testing.T) {
	d := harness.NewDaemon(t, harness.Set("network.bin_dirs", []string{harness.Dir()}))
	d.Start() // waits only for the runtime
	s, err := d.Runtime().Status(context.Background(), false)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range s.Status.Conditions {
		if c.Type == runtimeapi.NetworkReady && (c.Status || c.Reason == "" || c.Message == "") {
			t.Errorf("NetworkReady without plugins: got %v, want false with reason and message", c)
		}
	}
}

// TestStreamedLists compares the streamed lists with the unary ones.
func TestStreamedLists(t *testing.T) {
	ctx := context.Background()
	d := harness.StartDaemon(t)
	for range 3 {
		p := startPod(t, d)
		p.Run(harness.ContainerConfig("one", harness.Busybox, harness.Sleep()))
		p.Create(harness.ContainerConfig("two", harness.Busybox))
	}
	t.Run("StreamPodSandboxes", func(t *testing.T) {
		unary, err := d.CRI().ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
		stream, err2 := d.CRI().StreamPodSandboxes(ctx, &runtimeapi.StreamPodSandboxesRequest{})
		same(t, errors.Join(err, err2), unary.GetItems(),
			func() ([]*runtimeapi.PodSandbox, error) { r, err := stream.Recv(); return r.GetPodSandboxes(), err })
	})
	t.Run("StreamContainers", func(t *testing.T) {
		unary, err := d.CRI().ListContainers(ctx, &runtimeapi.ListContainersRequest{})
		stream, err2 := d.CRI().StreamContainers(ctx, &runtimeapi.StreamContainersRequest{})
		same(t, errors.Join(err, err2), unary.GetContainers(),
			func() ([]*runtimeapi.Container, error) { r, err := stream.Recv(); return r.GetContainers(), err })
	})
	t.Run("StreamImages", func(t *testing.T) {
		unary, err := d.ImageCRI().ListImages(ctx, &runtimeapi.ListImagesRequest{})
		stream, err2 := d.ImageCRI().StreamImages(ctx, &runtimeapi.StreamImagesRequest{})
		same(t, errors.Join(err, err2), unary.GetImages(),
			func() ([]*runtimeapi.Image, error) { r, err := stream.Recv(); return r.GetImages(), err })
	})
	t.Run("StreamContainerStats", func(t *testing.T) {
		unary, err := d.CRI().ListContainerStats(ctx, &runtimeapi.ListContainerStatsRequest{})
		stream, err2 := d.CRI().StreamContainerStats(ctx, &runtimeapi.StreamContainerStatsRequest{})
		same(t, errors.Join(err, err2), attributesOf(unary.GetStats()), func() ([]*runtimeapi.ContainerAttributes, error) {
			r, err := stream.Recv()
			return attributesOf(r.GetContainerStats()), err
		})
	})
	t.Run("StreamPodSandboxStats", func(t *testing.T) {
		unary, err := d.CRI().ListPodSandboxStats(ctx, &runtimeapi.ListPodSandboxStatsRequest{})
		stream, err2 := d.CRI().StreamPodSandboxStats(ctx, &runtimeapi.StreamPodSandboxStatsRequest{})
		same(t, errors.Join(err, err2), podAttributesOf(unary.GetStats()), func() ([]*runtimeapi.PodSandboxAttributes, error) {
			r, err := stream.Recv()
			return podAttributesOf(r.GetPodSandboxStats()), err
		})
	})
}

// attributesOf and podAttributesOf return the attributes of stats, because the figures change between two calls.
func attributesOf(stats []*runtimeapi.ContainerStats) []*runtimeapi.ContainerAttributes {
	var all []*runtimeapi.ContainerAttributes
	for _, s := range stats {
		all = append(all, s.Attributes)
	}
	return all
}

func podAttributesOf(stats []*runtimeapi.PodSandboxStats) []*runtimeapi.PodSandboxAttributes {
	var all []*runtimeapi.PodSandboxAttributes
	for _, s := range stats {
		all = append(all, s.Attributes)
	}
	return all
}

// same reads a stream to its end and compares it with the unary answer, in order.
func same[M proto.Message](t *testing.T, err error, unary []M, recv func() ([]M, error)) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	var streamed []M
	for {
		some, err := recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		streamed = append(streamed, some...)
	}
	if len(unary) == 0 || !slices.EqualFunc(unary, streamed, func(a, b M) bool { return proto.Equal(a, b) }) {
		t.Errorf("streamed list: got\n%v\nwant the unary list\n%v", streamed, unary)
	}
}
