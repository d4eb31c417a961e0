package e2e

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/registry"
)

// freeAddress returns an address on loopback whose port is free.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// TestImagesFromPeers stops the registry, and a node gets images from another node.
func TestImagesFromPeers(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "registry")
	if err := os.Symlink(filepath.Join(harness.Root(), "build", "images", "registry"), dir); err != nil {
		t.Fatal(err)
	}
	reg, err := registry.Start(t.Context(), dir, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = reg.Stop() })
	hosts, address := harness.Set("image.hosts_dirs", []string{filepath.Join(t.TempDir(), "none")}), freeAddress(t)
	first := harness.StartDaemon(t, hosts, harness.Set("image.mirror.address", address))
	second := harness.StartDaemon(t, hosts, harness.Set("image.peers.hosts", []string{"http://" + address}),
		harness.Set("image.peers.tags", true))

	name := func(image string) string {
		_, path, _ := strings.Cut(image, "/")
		return reg.Addr + "/" + path
	}
	busybox, nginx := name(harness.Busybox), name(harness.Nginx)
	id := first.Pull(t, busybox)
	first.Pull(t, nginx)
	byDigest := imageOf(t, first, nginx).RepoDigests[0]
	if err := reg.Stop(); err != nil {
		t.Fatal(err)
	}
	if got := second.Pull(t, busybox); got != id {
		t.Errorf("image of the second node: got %s, want %s", got, id)
	}
	second.Pull(t, byDigest)
	c := startPod(t, second).Run(harness.ContainerConfig("c", busybox, harness.Shell("echo from a peer")))
	c.WaitExit(0)
	if got := harness.Text(c.Logs(), ""); !strings.Contains(got, "from a peer") {
		t.Errorf("log of the container: got %q", got)
	}
	// An image that no peer has stays unavailable, with the error of the registry.
	missing := name(harness.Pause)
	_, err = second.ImageCRI().PullImage(context.Background(), &runtimeapi.PullImageRequest{Image: spec(missing)})
	if err == nil || !strings.Contains(err.Error(), "RegistryUnavailable") {
		t.Errorf("%s: got error %v, want RegistryUnavailable", missing, err)
	}
}
