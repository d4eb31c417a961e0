package node_test

import (
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/test/fake"
)

// poolStart is the first ID of the node's own ranges in these tests, of which there are two.
const poolStart = 1 << 30

// openMapping opens a node whose Linux pods can have user namespaces.
func openMapping(t *testing.T, dir string) *bench {
	t.Helper()
	b, err := openConfig(dir, func(c *node.Config, fakes map[string]*fake.Backend) {
		c.UserRange = sandbox.IDRange{First: poolStart, Length: 2*sandbox.IDMapLength + 1}
		for handler, mapping := range map[string]bool{"linux": true, "vm": false} {
			f, err := fake.New(fake.Config{Dir: filepath.Join(dir, handler),
				Capabilities: sandbox.Capabilities{UserNamespaces: true, MapsIDs: mapping}})
			if err != nil {
				t.Fatal(err)
			}
			fakes[handler], c.Backends[handler] = f, f
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// podIn is a pod with a user namespace that begins at the given ID; 0 leaves the choice to the node.
func podIn(name string, first uint32) *runtimeapi.PodSandboxConfig {
	c := podConfig(name)
	u := &runtimeapi.UserNamespace{}
	if first != 0 {
		u.Uids = []*runtimeapi.IDMapping{{HostId: first, Length: sandbox.IDMapLength}}
		u.Gids = u.Uids
	}
	c.Linux = &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
		NamespaceOptions: &runtimeapi.NamespaceOption{UsernsOptions: u},
	}}
	return c
}

// firstID returns the first of a pod's users on the node; 0 if the pod has no range.
func (b *bench) firstID(t *testing.T, id string) uint32 {
	t.Helper()
	p, err := b.Pod(id)
	if err != nil {
		t.Fatal(err)
	}
	uids := p.Config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetUsernsOptions().GetUids()
	if len(uids) == 0 {
		return 0
	}
	return uids[0].HostId
}

// TestUserRanges: the node gives each pod a range of its own, keeps it across a restart and takes it back with the pod.
func TestUserRanges(t *testing.T) {
	b := openMapping(t, t.TempDir())
	config := podIn("a", 0)
	a, second := b.run(t, "", config), b.run(t, "", podIn("b", 0))
	if got := b.firstID(t, a); got != poolStart {
		t.Errorf("the first pod's range begins at %d", got)
	}
	if !proto.Equal(config, podIn("a", 0)) {
		t.Error("the caller's message was changed")
	}
	if got := b.run(t, "", config); got != a {
		t.Errorf("a repeated request made pod %s, want %s", got, a)
	}
	b.close()
	b = openMapping(t, b.dir)
	defer b.close()
	if got := b.firstID(t, second); got != poolStart+sandbox.IDMapLength {
		t.Errorf("after a restart, the second pod's range begins at %d", got)
	}
	if _, err := b.RunSandbox(t.Context(), podIn("c", 0), ""); !errdefs.IsResourceExhausted(err) {
		t.Errorf("a third pod: error = %v", err)
	}
	if err := b.StopSandbox(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	if _, err := b.RunSandbox(t.Context(), podIn("c", 0), ""); !errdefs.IsResourceExhausted(err) {
		t.Errorf("a third pod beside a stopped one, whose files still exist: error = %v", err)
	}
	if err := b.RemoveSandbox(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	if got := b.firstID(t, b.run(t, "", podIn("c", 0))); got != poolStart {
		t.Errorf("the range of a removed pod was not used again: %d", got)
	}
}

// TestUserRangesOverlap: no two pods that run have an ID in common, except for sandboxes of the same pod.
func TestUserRangesOverlap(t *testing.T) {
	b := openMapping(t, t.TempDir())
	defer b.close()
	a := b.run(t, "", podIn("a", 1<<20))
	if _, err := b.RunSandbox(t.Context(), podIn("b", 1<<20+1000), ""); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("a range that overlaps another pod's: error = %v", err)
	}
	b.run(t, "", podIn("b", 1<<20+sandbox.IDMapLength))
	replaced := podIn("a", 1<<20)
	replaced.Metadata.Attempt = 1
	b.run(t, "", replaced)
	b.run(t, "vm", podIn("machine", 1<<20)) // maps nothing
	if got := b.firstID(t, b.run(t, "vm", podIn("machine2", 0))); got != 0 {
		t.Errorf("a pod that maps nothing got the range at %d", got)
	}
	if _, err := b.RunSandbox(t.Context(), podIn("c", 1<<20+1), ""); err == nil {
		t.Error("the range of two sandboxes of one pod was given to another pod")
	}
	if err := b.StopSandbox(t.Context(), a); err != nil {
		t.Fatal(err)
	}
	twice := podIn("d", 1<<24)
	twice.Linux.SecurityContext.NamespaceOptions.UsernsOptions.Uids = append(twice.Linux.SecurityContext.NamespaceOptions.UsernsOptions.Uids,
		&runtimeapi.IDMapping{HostId: 1 << 25, Length: 1})
	for _, handler := range []string{"", "vm"} {
		if _, err := b.RunSandbox(t.Context(), twice, handler); !errdefs.IsInvalidArgument(err) {
			t.Errorf("two mappings for handler %q: error = %v", handler, err)
		}
	}
}

// TestMountsGetTheNodesRange: the callers of a pod whose range the node has chosen cannot send mappings for its mounts.
func TestMountsGetTheNodesRange(t *testing.T) {
	b := openMapping(t, t.TempDir())
	defer b.close()
	for _, c := range []struct {
		pod    *runtimeapi.PodSandboxConfig
		mapped int
	}{{podIn("node", 0), 1}, {podIn("caller", 1<<20), 0}} {
		id := b.run(t, "", c.pod)
		request := func() *runtimeapi.ContainerConfig {
			container := containerConfig("c")
			container.Mounts = []*runtimeapi.Mount{{HostPath: "/tmp", ContainerPath: "/tmp"}}
			return container
		}
		first, err := b.CreateContainer(t.Context(), id, request())
		if err != nil {
			t.Fatal(err)
		}
		if again, err := b.CreateContainer(t.Context(), id, request()); err != nil || again != first {
			t.Errorf("a repeated request made container %s, %v; want %s", again, err, first)
		}
		made, _, err := b.Container(first)
		if err != nil {
			t.Fatal(err)
		}
		if m := made.Config.Mounts[0]; len(m.UidMappings) != c.mapped || len(m.GidMappings) != c.mapped {
			t.Errorf("pod %q: the mount has mappings %v, want %d", c.pod.Metadata.Name, m.UidMappings, c.mapped)
		}
	}
}
