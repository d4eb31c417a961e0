package vm

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestFlexVolume: Inspect warns that a flexVolume is shared as a directory. It does not warn about the kubelet's own
// volumes.
func TestFlexVolume(t *testing.T) {
	r := newRig(t)
	p := r.pod("flex")
	dir := filepath.Join(t.TempDir(), "pods", "uid", "volumes")
	flex, own := filepath.Join(dir, "example.com~nfs", "data"), filepath.Join(dir, "kubernetes.io~empty-dir", "scratch")
	for _, d := range []string{flex, own} {
		r.must(os.MkdirAll(d, 0o700))
	}
	c := r.create(p, "disk", func(c *runtimeapi.ContainerConfig) {
		c.Mounts = []*runtimeapi.Mount{{HostPath: flex, ContainerPath: "/data"}, {HostPath: own, ContainerPath: "/scratch"}}
	})
	info, err := r.Inspect(r.ctx(), p, c)
	r.must(err)
	if said := fmt.Sprint(info); !strings.Contains(said, "example.com/nfs, at /data,") || strings.Contains(said, "empty-dir, at") ||
		strings.Count(said, "flexVolume") != 1 {
		t.Errorf("Inspect = %s, want one warning, about example.com/nfs", said)
	}
	if d := r.driver.guest(c.ID).definition; len(d.Shares) != 2 {
		t.Errorf("shares = %+v, want 2", d.Shares)
	}
}
