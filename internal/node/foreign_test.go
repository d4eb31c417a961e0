package node_test

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/test/fake"
)

// componentConfig configures a container whose image is a component.
func componentConfig(name string, annotations ...string) *runtimeapi.ContainerConfig {
	c := containerConfig(name, annotations...)
	c.Image.Image = "component"
	return c
}

// runs lists the backends that have a container.
func (b *bench) runs(t *testing.T, pod, id string) (handlers []string) {
	t.Helper()
	for handler, f := range b.backend {
		s, err := f.Status(t.Context(), &sandbox.Pod{ID: pod, Config: podConfig("p")}, &sandbox.Container{ID: id})
		must(t, err)
		if s.State == sandbox.StateRunning {
			handlers = append(handlers, handler)
		}
	}
	return handlers
}

// TestForeignContainers: in a pod with many containers, the backend for components runs those whose image is one. They
// live as the others do, and the node finds them again.
func TestForeignContainers(t *testing.T) {
	b := open(t, t.TempDir())
	pod := b.run(t, "linux", podConfig("p"))
	plain, component := b.create(t, pod, containerConfig("plain")), b.create(t, pod, componentConfig("component"))
	ends := b.create(t, pod, componentConfig("ends", "exit-after", "30ms", "exit-code", "5"))
	must(t, b.StartContainer(t.Context(), plain), b.StartContainer(t.Context(), component), b.StartContainer(t.Context(), ends))
	for id, want := range map[string]string{plain: "linux", component: "wasm"} {
		if got := b.runs(t, pod, id); !slices.Equal(got, []string{want}) {
			t.Errorf("backends of container %s: got %v, want %s", id, got, want)
		}
	}
	eventually(t, "the exit of a foreign container is recorded", func() bool { return b.state(t, ends) == node.Stopped })
	if p, err := b.Pod(pod); err != nil || p.Unit() || len(p.Visible()) != 3 {
		t.Errorf("pod: got %+v, %v; want three containers", p, err)
	}
	debug := containerConfig("debug")
	debug.Linux = &runtimeapi.LinuxContainerConfig{SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
		NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_TARGET, TargetId: component},
	}}
	if _, err := b.CreateContainer(t.Context(), pod, debug); !errdefs.IsNotImplemented(err) {
		t.Errorf("a container in the PID namespace of a component: got error %v, want not implemented", err)
	}
	debug.Linux.SecurityContext.NamespaceOptions.TargetId = plain
	b.create(t, pod, debug)
	s, err := b.ContainerSession(t.Context(), component, sandbox.SessionAttach)
	if !errdefs.IsNotImplemented(err) {
		t.Errorf("session: got %+v, %v; want the error of a fake backend", s, err)
	}
	b = b.reopen(t)
	for id, want := range map[string]node.State{plain: node.Running, component: node.Running, ends: node.Stopped} {
		if got := b.state(t, id); got != want {
			t.Errorf("state of %s after a restart: got %s, want %s", id, got, want)
		}
	}
	must(t, b.StopContainer(t.Context(), component, time.Second), b.RemoveContainer(t.Context(), component), b.StopSandbox(t.Context(), pod),
		b.RemoveSandbox(t.Context(), pod))
	if left := b.residue(t); len(left) > 0 {
		t.Errorf("residue: got %v, want none", left)
	}
}

// TestForeignContainersWaitForBothBackends: a pod with a foreign container accepts no orders until both of its backends
// have recovered.
func TestForeignContainersWaitForBothBackends(t *testing.T) {
	for _, late := range []string{"linux", "wasm"} {
		t.Run(late, func(t *testing.T) {
			b := open(t, t.TempDir())
			pod := b.run(t, "linux", podConfig("p"))
			component := b.create(t, pod, componentConfig("component"))
			must(t, b.StartContainer(t.Context(), component))
			b.close()
			there := make(chan struct{})
			b, err := openChanged(b.dir, func(backends map[string]sandbox.Backend, fakes map[string]*fake.Backend) {
				backends[late] = waiting{fakes[late], there}
			})
			must(t, err)
			t.Cleanup(b.close)
			for what, err := range map[string]error{"stop": b.StopContainer(t.Context(), component, 0),
				"stop the pod": b.StopSandbox(t.Context(), pod)} {
				if !errdefs.IsUnavailable(err) {
					t.Errorf("%s while %s has not recovered: got error %v, want unavailable", what, late, err)
				}
			}
			close(there)
			eventually(t, "the pod accepts orders", func() bool { return b.StopContainer(t.Context(), component, 0) == nil })
			if got := b.state(t, component); got != node.Stopped {
				t.Errorf("state of the foreign container: got %s, want %s", got, node.Stopped)
			}
			must(t, b.RemoveSandbox(t.Context(), pod))
			if left := b.residue(t); len(left) > 0 {
				t.Errorf("residue: got %v, want none", left)
			}
		})
	}
}

// unready is a backend that counts the orders to remove containers.
type unready struct {
	waiting
	orders *atomic.Int32
}

func (u unready) RemoveContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	u.orders.Add(1)
	return u.waiting.RemoveContainer(ctx, p, c)
}

// bystander is a backend without pods.
type bystander struct{ sandbox.Backend }

func (bystander) Recover(context.Context, []sandbox.Known, sandbox.Sink) (sandbox.Found, error) {
	return sandbox.NewFound(), nil
}

// TestNoBackendIsReadyBeforeAllAreBarred: an interrupted removal of a pod goes on only after both of its backends have
// recovered, however quick the first one is. With many backends, the first has recovered before the last one begins.
func TestNoBackendIsReadyBeforeAllAreBarred(t *testing.T) {
	b := open(t, t.TempDir())
	pod := b.run(t, "linux", podConfig("p"))
	b.create(t, pod, componentConfig("component", "remove-container", "error(not yet)"))
	if err := b.RemoveSandbox(t.Context(), pod); err == nil {
		t.Fatal("the removal succeeded, want one that is left to the next start")
	}
	b.close()
	for range 5 { // the order of backends is random
		early := &atomic.Int32{}
		b, err := openChanged(b.dir, func(backends map[string]sandbox.Backend, fakes map[string]*fake.Backend) {
			for i := range 20000 {
				backends[fmt.Sprint("bystander-", i)] = bystander{fakes["linux"]}
			}
			backends["wasm"] = unready{waiting{Backend: fakes["wasm"]}, early} // it never recovers
		})
		must(t, err)
		b.close()
		if n := early.Load(); n > 0 {
			t.Errorf("the backend got %d orders before it had recovered, want none", n)
		}
	}
}

// TestNodeWithoutComponents: without a backend for components, a container with a component is refused, and a daemon that
// no longer has the backend leaves the pods with foreign containers alone.
func TestNodeWithoutComponents(t *testing.T) {
	b := open(t, t.TempDir())
	pod := b.run(t, "linux", podConfig("p"))
	component := b.create(t, pod, componentConfig("component"))
	b.close()
	b, err := openConfig(b.dir, func(c *node.Config, _ map[string]*fake.Backend) {
		delete(c.Backends, "wasm")
	})
	must(t, err)
	t.Cleanup(b.close)
	if err := b.StartContainer(t.Context(), component); !errdefs.IsUnavailable(err) {
		t.Errorf("start of a foreign container without its backend: got error %v, want unavailable", err)
	}
	other := b.run(t, "linux", podConfig("other"))
	if _, err := b.CreateContainer(t.Context(), other, componentConfig("component")); !errdefs.IsNotImplemented(err) {
		t.Errorf("creation of a foreign container without its backend: got error %v, want not implemented", err)
	}
	must(t, b.RemoveSandbox(t.Context(), other))
	if _, err := openConfig(t.TempDir(),
		func(c *node.Config, _ map[string]*fake.Backend) { c.ComponentHandler = "vm" }); !errdefs.IsInvalidArgument(err) {
		t.Errorf("a handler without foreign containers: got error %v, want invalid argument", err)
	}
}

// TestClaims: the configuration and the image of a container decide which backend runs it, except in unit pods.
func TestClaims(t *testing.T) {
	b, err := openConfig(t.TempDir(), func(c *node.Config, _ map[string]*fake.Backend) {
		c.Claims = func(config *runtimeapi.ContainerConfig, img image.Image) bool {
			return len(config.GetCommand()) == 0 && img.Component != nil
		}
	})
	must(t, err)
	t.Cleanup(b.close)
	withCommand := componentConfig("with-command")
	withCommand.Command = []string{"sh"}
	for _, c := range []struct {
		pod    string
		config *runtimeapi.ContainerConfig
		want   string
	}{
		{"linux", componentConfig("claimed"), "wasm"},
		{"linux", withCommand, "linux"},
		{"linux", containerConfig("another-image"), "linux"},
		{"vm", componentConfig("in-a-unit-pod"), "vm"},
	} {
		name := c.config.GetMetadata().GetName()
		pod := b.run(t, c.pod, podConfig(name))
		id := b.create(t, pod, c.config)
		must(t, b.StartContainer(t.Context(), id))
		if p, err := b.Pod(pod); err != nil || p.Unit() {
			id = pod
		}
		if got := b.runs(t, pod, id); !slices.Equal(got, []string{c.want}) {
			t.Errorf("%s: runs in %v, want %s", name, got, c.want)
		}
	}
}
