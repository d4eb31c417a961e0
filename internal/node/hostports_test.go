package node_test

import (
	"context"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/test/fake"
)

const udp = runtimeapi.Protocol_UDP

func podAt(name string, onHost bool, ports ...*runtimeapi.PortMapping) *runtimeapi.PodSandboxConfig {
	c := podConfig(name)
	c.PortMappings = ports
	if onHost {
		c.Linux = &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
			NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE},
		}}
	}
	return c
}

// wantTaken checks that a pod is refused because of its host ports, that the error names the holder, and that nothing of
// the pod is left.
func (b *bench) wantTaken(t *testing.T, handler string, config *runtimeapi.PodSandboxConfig, holder string) {
	t.Helper()
	pods := len(b.Pods())
	_, err := b.RunSandbox(context.Background(), config, handler)
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), holder) {
		t.Errorf("%s: got error %v, want ErrFailedPrecondition that names %s", config.Metadata.Name, err, holder)
	}
	if n := len(b.Pods()); n != pods {
		t.Errorf("%d pods after a refused one, want %d", n, pods)
	}
}

// TestHostPortsOfPods: a host port belongs to one pod, whatever its kind, until the pod's network is released.
func TestHostPortsOfPods(t *testing.T) {
	b := open(t, t.TempDir())
	first := podAt("first", false, &runtimeapi.PortMapping{HostPort: 12100, ContainerPort: 80})
	id := b.run(t, "", first)
	if again := b.run(t, "", first); again != id {
		t.Errorf("a repeated request made pod %s, want %s", again, id)
	}
	b = b.reopen(t)
	holder := "pod default/first (ID " + id + ")"
	b.wantTaken(t, "", podAt("same", false, &runtimeapi.PortMapping{HostPort: 12100, ContainerPort: 81}), holder)
	b.wantTaken(t, "", podAt("at one address", false, &runtimeapi.PortMapping{HostIp: "192.0.2.1", HostPort: 12100, ContainerPort: 80}),
		holder)
	b.wantTaken(t, "", podAt("at all addresses", false, &runtimeapi.PortMapping{HostIp: "::", HostPort: 12100, ContainerPort: 80}), holder)
	b.wantTaken(t, "vm", podAt("machine", false, &runtimeapi.PortMapping{HostPort: 12100, ContainerPort: 80}), holder)
	b.wantTaken(t, "wasm", podAt("component", false, &runtimeapi.PortMapping{HostPort: 12100, ContainerPort: 80}), holder)
	b.wantTaken(t, "", podAt("on the host", true, &runtimeapi.PortMapping{ContainerPort: 12100}), holder)
	for _, free := range []*runtimeapi.PodSandboxConfig{
		podAt("udp", false, &runtimeapi.PortMapping{Protocol: udp, HostPort: 12100, ContainerPort: 80}),
		podAt("other port", false, &runtimeapi.PortMapping{HostPort: 12101, ContainerPort: 80}),
		podAt("no host port", false, &runtimeapi.PortMapping{ContainerPort: 12100}),
		podAt("loopback", false, &runtimeapi.PortMapping{HostIp: "127.0.0.1", HostPort: 12102, ContainerPort: 80}),
		podAt("other address", false, &runtimeapi.PortMapping{HostIp: "::1", HostPort: 12102, ContainerPort: 80}),
		podAt("on the host 2", true, &runtimeapi.PortMapping{HostPort: 12103, ContainerPort: 12103}),
	} {
		b.run(t, "", free)
	}
	b.wantTaken(t, "", podAt("port of the host network", false, &runtimeapi.PortMapping{HostPort: 12103, ContainerPort: 80}),
		"default/on the host 2")

	if err := b.StopSandbox(context.Background(), id); err != nil {
		t.Fatal(err)
	}
	next := podAt("first", false, first.PortMappings...)
	next.Metadata.Attempt = 1
	b.run(t, "", next)
}

// TestHostPortOfAStuckPod: a pod whose network cannot be released keeps its ports, except from its own next sandbox.
func TestHostPortOfAStuckPod(t *testing.T) {
	net := failingNetwork{fails: new(atomic.Bool)}
	b, err := openConfig(t.TempDir(), func(c *node.Config, _ map[string]*fake.Backend) {
		net.Network = c.Network.(*fake.Network)
		c.Network = net
	})
	must(t, err)
	t.Cleanup(b.close)
	mapping := &runtimeapi.PortMapping{HostPort: 12105, ContainerPort: 80}
	id := b.run(t, "", podAt("stuck", false, mapping))
	net.fails.Store(true)
	if err := b.StopSandbox(t.Context(), id); err == nil {
		t.Fatal("StopSandbox succeeded with a failing network, want an error")
	}
	b.wantTaken(t, "", podAt("other", false, mapping), id)
	next := podAt("stuck", false, mapping)
	next.Metadata.Attempt = 1
	b.run(t, "", next)
	net.fails.Store(false)
}

// TestHostPortRace: of many pods at the same time, one gets the port.
func TestHostPortRace(t *testing.T) {
	b := open(t, t.TempDir())
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			_, _ = b.RunSandbox(context.Background(),
				podAt(strconv.Itoa(i), i%2 == 0, &runtimeapi.PortMapping{HostPort: 12104, ContainerPort: 12104}), "")
		})
	}
	all.Wait()
	if n := len(b.Pods()); n != 1 {
		t.Errorf("%d pods have the port, want 1", n)
	}
}

// TestHostPortsOfProcesses: a host port on which a process of the node listens is no pod's.
func TestHostPortsOfProcesses(t *testing.T) {
	b := open(t, t.TempDir())
	all, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer all.Close()
	port := int32(all.Addr().(*net.TCPAddr).Port)
	b.wantTaken(t, "", podAt("pod", false, &runtimeapi.PortMapping{HostPort: port, ContainerPort: 80}), "process node.test (PID ")
	b.wantTaken(t, "", podAt("on the host", true, &runtimeapi.PortMapping{ContainerPort: port}), "process node.test (PID ")
	all.Close()
	b.run(t, "", podAt("pod", false, &runtimeapi.PortMapping{HostPort: port, ContainerPort: 80}))
}
