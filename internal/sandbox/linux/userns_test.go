package linux

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// firstID is the first of the node's IDs in the tests' user namespaces.
const firstID = 1 << 24

// mapped requests a user namespace.
func mapped(c *runtimeapi.PodSandboxConfig) {
	uids, gids := testIDs().Mappings()
	c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &runtimeapi.UserNamespace{Uids: uids, Gids: gids}
}

func testIDs() sandbox.IDMap {
	r := sandbox.IDRange{First: firstID, Length: sandbox.IDMapLength}
	return sandbox.IDMap{Users: r, Groups: r}
}

// volume mounts a host path, with the pod's mappings.
func mappedVolume(host, path string, change ...func(*runtimeapi.Mount)) func(*runtimeapi.ContainerConfig) {
	return func(c *runtimeapi.ContainerConfig) {
		m := &runtimeapi.Mount{HostPath: host, ContainerPath: path}
		m.UidMappings, m.GidMappings = testIDs().Mappings()
		for _, f := range change {
			f(m)
		}
		c.Mounts = append(c.Mounts, m)
	}
}

func TestUserNamespace(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod(mapped)
		dir := filepath.Join(t.TempDir(), "volume")
		if err := errors.Join(os.Mkdir(dir, 0o700), os.WriteFile(filepath.Join(dir, "secret"), []byte("s3cret\n"), 0o400)); err != nil {
			t.Fatal(err)
		}
		c := p.container("echo up; "+forever, mappedVolume(dir, "/volume")).start()
		c.waitLog("up")
		for script, want := range map[string]string{
			"cat /proc/self/uid_map": fmt.Sprintf("0 %d 65536", firstID),
			"cat /proc/self/gid_map": fmt.Sprintf("0 %d 65536", firstID),
			"id -u; id -g":           "0 0",
			"stat -c %u:%g / /bin/sh /etc/hosts /dev/shm /volume": "0:0 0:0 0:0 0:0 0:0",
			"cat /volume/secret":                                     "s3cret",
			"echo hi > /volume/new; stat -c %u /volume/new":          "0",
			"echo hi > /bin/new; stat -c %u /bin/new; rm /bin/new":   "0",
			"echo 127.0.0.9 nine >> /etc/hosts; tail -n1 /etc/hosts": "127.0.0.9 nine",
			"hostname": p.Config.Hostname,
			"cat /proc/sys/net/ipv4/ip_unprivileged_port_start":  "0",
			"ls -d /sys/class/net/lo":                            "/sys/class/net/lo",
			"echo x > /dev/null; stat -c %n /dev/null /dev/ptmx": "/dev/null /dev/ptmx",
			"echo 1 > /proc/sys/kernel/panic || echo denied":     "denied",
		} {
			if got := strings.Join(strings.Fields(c.exec(script)), " "); got != want {
				t.Errorf("%s: %q, want %q", script, got, want)
			}
		}
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(dir, "new"), &st); err != nil || st.Uid != 0 {
			t.Errorf("a file of the pod's root in the volume: owner %d, %v; want the node's root", st.Uid, err)
		}
		s, err := r.Status(context.Background(), p.Pod, c.Container)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Stat(fmt.Sprintf("/proc/%d", s.Pid), &st); err != nil || st.Uid != firstID {
			t.Errorf("the container's process belongs to user %d, %v", st.Uid, err)
		}
	})
}
