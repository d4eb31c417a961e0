package e2e

import (
	"slices"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// Regression tests for cases that critest, the CRI's conformance suite, has found.

// TestHostPIDOfAServer: a pod in the node's PID namespace sees another container's server under the PID in the server's
// PID file.
func TestHostPIDOfAServer(t *testing.T) {
	d := harness.StartDaemon(t)
	node := func(n *namespaces) { n.Pid = runtimeapi.NamespaceMode_NODE }
	p := startPod(t, d, harness.Namespaces(node))
	share := harness.Security(func(s *security) { node(s.NamespaceOptions) })
	server := harness.ContainerConfig("server", harness.Nginx, share)
	server.LogPath = ""
	pid := strings.TrimSpace(p.Run(server).Must("sh", "-c", "until cat /var/run/nginx.pid 2>/dev/null; do sleep 0.1; done"))
	seen := p.Run(harness.ContainerConfig("observer", harness.Busybox, harness.Sleep(), share)).Must("pidof", "nginx")
	if !slices.Contains(strings.Fields(seen), pid) {
		t.Errorf("PIDs of the server: got %s, want %s among them", seen, pid)
	}
}

// TestImageVolumeRuns: programs in an image volume can run unless the request has the mount option noexec.
func TestImageVolumeRuns(t *testing.T) {
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	volume := func(options ...string) *runtimeapi.Mount {
		return &runtimeapi.Mount{ContainerPath: "/volume", Image: &runtimeapi.ImageSpec{Image: harness.Busybox}, Readonly: true,
			MountOptions: options}
	}
	t.Run("its programs run", func(t *testing.T) {
		if got := sleeper(t, d, mounts(volume())).Must("/volume/bin/ls", "/volume"); !strings.Contains(got, "bin") {
			t.Errorf("output of ls: got %q, want bin", got)
		}
	})
	t.Run("noexec is heeded", func(t *testing.T) {
		c := sleeper(t, d, mounts(volume("noexec")))
		if _, stderr, code := c.ExecSync("sh", "-c", "/volume/bin/ls /volume"); code == 0 || !strings.Contains(stderr, "Permission denied") {
			t.Errorf("program with noexec: got code %d, stderr %q; want \"Permission denied\"", code, stderr)
		}
	})
	t.Run("it brings neither devices nor set-user-ID programs", func(t *testing.T) {
		table := sleeper(t, d, mounts(volume())).Must("cat", "/proc/mounts")
		for line := range strings.Lines(table) {
			if f := strings.Fields(line); f[1] == "/volume" {
				for _, o := range []string{"ro", "nodev", "nosuid"} {
					if !strings.Contains(","+f[3]+",", ","+o+",") {
						t.Errorf("mount options: got %s, want %s among them", line, o)
					}
				}
				return
			}
		}
		t.Errorf("found no mount at /volume in\n%s", table)
	})
}
